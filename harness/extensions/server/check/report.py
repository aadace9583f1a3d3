"""A check of a server: for people verdict, what it can do, a table of schedules, findings; for programs all of it."""

from collections.abc import Iterator
from typing import Any

from harness.extensions.server.check.result import EndpointResult, LogprobResult, ScheduleResult
from harness.extensions.server.report import findings, server_headline
from harness.report.check.sentences import explanation_label, explanation_lines
from harness.report.check.table import count, number
from harness.report.document import document, plain
from harness.report.terminal import MIN_WIDTH, blocks_text, fact_lines, table_lines, wrapped
from harness.results.check import Outcome

_HEADERS = ("schedule", "requests", "tokens", "ties", "logprobs", "rms", "max", "verdict")
_ALIGN = ("left", "right", "right", "right", "left", "left", "left", "left")


def endpoint_text(result: EndpointResult, *, width: int) -> str:
    """Return a check of a server as lines of at most `width` columns, but for the table (about 95)."""
    width = max(width, MIN_WIDTH)
    head = server_headline(result, count(result.num_requests, "prompt"))
    cause, facts = _cause(result, width), fact_lines(_facts(result), width)
    return blocks_text([[head], _table(result), findings(result.runs, width), cause, facts])


def _cause(result: EndpointResult, width: int) -> Iterator[str]:
    if result.explanation is not None:
        label = f"  {explanation_label(result.explanation)}: "
        yield from wrapped(label, "; ".join(explanation_lines(result.explanation)), width, indent=8)


def _table(result: EndpointResult) -> list[str]:
    rows = [row for run in result.runs for row in _rows(run)]
    legend = [
        "rms, max   error of the log probabilities, as multiples of HF's own in this dtype, and the bound",
        "ties       tokens that are not HF's, where HF's own margin is below its noise",
    ]
    return table_lines(rows, _HEADERS, _ALIGN, legend=legend)


def _rows(run: ScheduleResult) -> Iterator[tuple[str, ...]]:
    answered = run.num_requests - run.num_failed
    requests = str(answered) if not run.num_failed else f"{answered} of {run.num_requests}"
    tokens = f"{run.tokens.equal + run.tokens.ties:,} of {run.tokens.compared:,}"
    head = (run.schedule, requests, tokens, f"{run.tokens.ties:,}")
    verdict = {Outcome.PASS: "sound", Outcome.MISMATCH: "wrong", Outcome.NOTHING: "not judged"}[run.outcome]
    if not run.logprobs:
        yield (*head, "-", "", "", verdict)
    for at, logprobs in enumerate(run.logprobs):
        yield (*(head if at == 0 else ("",) * 4), *_figures(logprobs), verdict if at == 0 else "")


def _figures(logprobs: LogprobResult) -> tuple[str, ...]:
    label = f"{logprobs.kind}, {logprobs.num_values:,}"
    rms, max = (logprobs.rms_ratio, logprobs.rms_bound), (logprobs.max_ratio, logprobs.max_bound)
    return (
        label,
        *(f"{number(ratio)} {'≤' if ratio <= bound else '>'} {number(bound)}" for ratio, bound in (rms, max)),
    )


def _facts(result: EndpointResult) -> Iterator[tuple[str, str]]:
    able = [capability for capability in result.capabilities if capability.is_there]
    ignored = [capability for capability in result.capabilities if capability.is_ignored]
    lacking = [
        capability for capability in result.capabilities if not capability.is_there and not capability.is_ignored
    ]
    yield "found", ", ".join(_named(item.name, item.detail) for item in able)
    if ignored:
        yield "ignored", ", ".join(_named(item.name, item.detail) for item in ignored)
    if lacking:
        yield "not found", "; ".join(_named(item.name, item.detail[:80]) for item in lacking)
    differences = [
        f"{run.schedule} {number(run.max_difference)}" for run in result.runs if run.max_difference is not None
    ]
    if differences:
        yield "difference", f"max difference (nats) from the first schedule: {', '.join(differences)}"
    num_diverged = sum(run.num_diverged for run in result.runs)
    if num_diverged:
        what = f"{count(num_diverged, 'answer')} diverged at a tie; the tokens after the tie were not judged"
        yield "diverged", what
    yield from (("note", note) for note in result.notes)
    seconds = ", ".join(f"{run.schedule} {number(run.seconds)} s" for run in result.runs)
    timings = f"server {number(result.server_s)} s ({seconds}), truth {number(result.truth_s)} s"
    yield "timings", f"{timings}, all {number(result.all_s)} s"


def _named(name: str, detail: str) -> str:
    return f"{name} ({detail})" if detail else name


def endpoint_json(result: EndpointResult) -> dict[str, Any]:
    """Return a check of a server as plain dicts, lists, strings and finite numbers."""
    whole = document(result)
    seconds = {"server": whole.pop("server_s"), "truth": whole.pop("truth_s"), "all": whole.pop("all_s")}
    whole |= {"verdict": result.outcome, "endpoint": whole.pop("url"), "timings_s": seconds}
    findings = [plain(finding) | {"schedule": run.schedule} for run in result.runs for finding in run.findings]
    return whole | {"schedules": [run.schedule for run in result.runs], "findings": findings}
