"""The first line about a server: the verdict, and what was checked."""

from collections.abc import Mapping
from pathlib import PurePath

from harness.report.check.sentences import printable
from harness.results.check import Outcome

VERDICTS = {Outcome.PASS: "PASS", Outcome.MISMATCH: "MISMATCH", Outcome.NOTHING: "NOTHING CHECKED"}


def headline(outcome: Outcome, server: str, url: str, model: str, *others: str) -> str:
    """Return the line; `server` may be empty."""
    name = PurePath(model).name if model.startswith(("/", ".")) else model
    parts = [f"{server} at {url}" if server else url, name, *others]
    return f"{VERDICTS[outcome]}  {' · '.join(printable(part) for part in parts)}"


def not_judged(reasons: Mapping[str, str]) -> str:
    """Return what was not judged, with the reasons."""
    words = "; ".join(f"{name} ({reason[:80]})" for name, reason in reasons.items())
    return printable(words) or "nothing was left out"
