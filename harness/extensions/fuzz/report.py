"""A search of workloads: what was found, with its smallest workload, and what was reached."""

from collections.abc import Iterator, Sequence
from typing import Any

from harness.extensions.fuzz.result import FuzzFinding, FuzzResult, SentRequest, SentWorkload
from harness.report.check.json import run_json
from harness.report.check.sentences import divergence_lines, model_name, number, printable
from harness.report.check.table import count
from harness.report.document import document, plain
from harness.report.terminal import MIN_WIDTH, blocks_text, fact_lines, headline, table_lines, wrapped
from harness.results.check import Outcome

INDENT = 18


def fuzz_text(result: FuzzResult, *, width: int) -> str:
    """Return a search as lines of at most `width` columns (80 at least)."""
    width = max(width, MIN_WIDTH)
    findings = (_finding(at, finding, width) for at, finding in enumerate(result.findings, start=1))
    facts = fact_lines(_facts(result), width, indent=13)
    return blocks_text([[_headline(result)], *findings, _coverage(result), facts])


def _headline(result: FuzzResult) -> str:
    words = {Outcome.PASS: "NOTHING FOUND", Outcome.MISMATCH: "FOUND", Outcome.NOTHING: "NOTHING CHECKED"}
    found = [count(len(result.findings), "finding")] if result.findings else []
    counts = [*found, count(result.num_workloads, "workload"), count(result.num_rows, "row")]
    subject = (result.engine, model_name(result.model), result.dtype, result.device)
    return headline(words[result.outcome], *subject, *counts)


def _finding(at: int, finding: FuzzFinding, width: int) -> Iterator[str]:
    yield f"{at}. {printable(finding.signature)}"
    yield ""
    yield from (f"   {line}" for line in _workload(finding.workload))
    yield ""
    if finding.error is not None:
        for line in finding.error.splitlines():
            yield from wrapped("", printable(line), width, indent=3)
    elif finding.run is not None and finding.run.first_divergence is not None:
        for label, text in divergence_lines(finding.run.first_divergence):
            yield from wrapped(label, text, width, indent=INDENT)
    elif finding.run is not None:
        for item in finding.run.findings[:3]:
            yield from wrapped("", f"{item.code}: {printable(item.message)}", width, indent=3)
    yield from wrapped("           Found:", _history(finding), width, indent=INDENT)
    if finding.workload_file:
        yield f"{'          Repeat:':{INDENT}}harness fuzz --replay {printable(finding.workload_file)}"
    if finding.case_file:
        yield f"{'':{INDENT}}harness check --case {printable(finding.case_file)}"


def _workload(workload: SentWorkload) -> list[str]:
    """Return the table of the requests, and the limits."""
    headers = ("request", "prompt", "new", "tokens shared", "comes", "ends")
    rows = [
        (at, request.prompt_length, request.num_new_tokens, _shared(at, workload), _arrival(request), _end(request))
        for at, request in enumerate(workload.requests)
    ]
    limits = ", ".join(f"{name}={str(value).lower()}" for name, value in workload.limits.items())
    others = [f"limits: {limits}"] if limits else []
    others += [f"schedule: {printable(workload.schedule)}"] if workload.schedule else []
    return [*table_lines(rows, headers, _ALIGN), *others]


_ALIGN = ("right", "right", "right", "left", "left", "left")


def _shared(at: int, workload: SentWorkload) -> str:
    """Say what a request has in common with one before it: what a cache may share, or confuse."""
    own = workload.requests[at].token_ids
    lengths = [_common(own, other.token_ids) for other in workload.requests[:at]]
    longest = max(lengths, default=0)
    return f"{longest} with request {lengths.index(longest)}" if longest else "-"


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _arrival(request: SentRequest) -> str:
    if request.fork_of is not None:
        return f"fork of request {request.fork_of}"
    return f"before step {request.arrival}" if request.arrival else "at once"


def _end(request: SentRequest) -> str:
    return "aborted" if request.is_aborted else "finished"


def _history(finding: FuzzFinding) -> str:
    text = f"after {number(finding.found_s)} s"
    if finding.shrunk_s:
        before = f"{count(finding.num_requests_found, 'request')} of {count(finding.num_rows_found, 'row')}"
        text += f"; shrunk in {number(finding.shrunk_s)} s from {before}"
    more = finding.num_failures - 1
    return text + (f"; {count(more, 'more workload')} failed in the same way" if more else "")


def _coverage(result: FuzzResult) -> list[str]:
    """Return the table of what the engine's scheduler did, the commonest first."""
    ordered = sorted(result.coverage.items(), key=lambda pair: (-pair[1], pair[0]))
    rows = [(printable(name), times) for name, times in ordered]
    return table_lines(rows, ("what the scheduler did", "workloads"), ("left", "right")) if rows else []


def _facts(result: FuzzResult) -> Iterator[tuple[str, str]]:
    for what, times in result.rejected.items():
        yield "rejected", f"{count(times, 'workload')}: {what}"
    yield from (("note", note) for note in result.notes)
    if result.unreached:
        yield "note", f"no workload reached {' and '.join(result.unreached)}: give the search more --seconds"
    if result.was_interrupted:
        yield "note", "interrupted: what was found until then"
    yield "timings", f"golden {number(result.golden_s)} s, all {number(result.elapsed_s)} s, seed {result.seed}"


def fuzz_json(result: FuzzResult) -> dict[str, Any]:
    """Return a search as plain dicts, lists, strings and finite numbers."""
    whole = document(result)
    timings = {"golden": whole.pop("golden_s"), "all": whole.pop("elapsed_s")}
    findings = [_finding_document(finding) for finding in result.findings]
    return {**whole, "verdict": result.outcome, "timings_s": timings, "findings": findings}


def _finding_document(finding: FuzzFinding) -> dict[str, Any]:
    document: dict[str, Any] = plain(finding)
    document["run"] = None if finding.run is None else run_json(finding.run)
    document["first_divergence"] = None if finding.run is None else plain(finding.run.first_divergence)
    return document
