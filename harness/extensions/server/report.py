"""Parts of the reports of every check of a server: headline, findings, what was not judged, and curl commands."""

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.errors import printable
from harness.extensions.server.check.result import ScheduleResult
from harness.report.check.sentences import MAX_FINDINGS, MAX_FINDINGS_OF_A_CODE, model_name
from harness.report.terminal import VERDICTS, headline, wrapped
from harness.results.check import Finding


def server_headline(result: Any, *others: str) -> str:
    """Return the first line of a result about a server."""
    where = at_server(result.server, result.url)
    return headline(VERDICTS[result.outcome], where, model_name(result.model), result.dtype, *others)


def at_server(server: str, url: str) -> str:
    """Return what was checked; `server` may be empty."""
    return f"{server} at {url}" if server else url


def not_judged(result: Any) -> tuple[str, str]:
    """Return what was not judged and why, as a fact of a report."""
    words = "; ".join(f"{name} ({reason[:80]})" for name, reason in result.not_judged.items())
    return "not judged", words or "nothing was left out"


def curl(url: str, body: Mapping[str, Any]) -> str:
    """Return the command that posts a body. A server names models and tokens: nothing of it is read by the shell."""
    header = shlex.quote("content-type: application/json")
    return f"curl -s {shlex.quote(url)} -H {header} -d {shlex.quote(json.dumps(body))}"


def findings(runs: Sequence[ScheduleResult], width: int) -> Iterator[str]:
    """Yield the first findings of each code, each once for all schedules that share it."""
    schedules: dict[Finding, list[str]] = {}
    for run in runs:
        for finding in run.findings:
            schedules.setdefault(finding, []).append(run.schedule)
    seen, left = Counter[str](), 0
    for finding, names in schedules.items():
        seen[finding.code] += 1
        if seen[finding.code] > MAX_FINDINGS_OF_A_CODE or seen.total() - left > MAX_FINDINGS:
            left += 1
            continue
        yield from wrapped(f"  {finding.code}", _sentence(finding, names), width, indent=8)
    if left:
        yield f"        and {left:,} more"


def _sentence(finding: Finding, schedules: Sequence[str]) -> str:
    place = [f"request {finding.request}"] if finding.request is not None else []
    place += [f"position {finding.position}"] if finding.position is not None else []
    return printable(f"{', '.join([*schedules, *place])}: {finding.message}")
