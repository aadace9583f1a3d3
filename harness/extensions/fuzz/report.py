"""Findings of `harness fuzz` for people at a terminal, and the JSON of a search."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from harness.errors import printable
from harness.extensions.fuzz.result import (
    FuzzFinding,
    FuzzResult,
    Invariance,
    InvarianceResult,
    Leak,
    PoisonedMemory,
    PoisonResult,
    ScheduleChange,
    SentRequest,
    SentWorkload,
)
from harness.report.check.json import run_json
from harness.report.check.sentences import divergence_lines, model_name
from harness.report.check.table import count, number
from harness.report.document import document, plain
from harness.report.terminal import MIN_WIDTH, blocks_text, fact_lines, headline, table_lines, wrapped
from harness.results.check import Memory, Outcome

INDENT = 18


def fuzz_text(result: FuzzResult, *, width: int) -> str:
    """Return a search as lines of at most `width` columns (80 at least)."""
    width = max(width, MIN_WIDTH)
    findings = (_finding(at, finding, width) for at, finding in enumerate(result.findings, start=1))
    facts = fact_lines(_facts(result), width, indent=13)
    return blocks_text([[_headline_of_search(result)], *findings, _coverage(result), facts])


def _headline_of_search(result: FuzzResult) -> str:
    words = {Outcome.PASS: "NOTHING FOUND", Outcome.MISMATCH: "FOUND", Outcome.NOTHING: "NOTHING CHECKED"}
    finding_count = [count(len(result.findings), "finding")] if result.findings else []
    counts = [*finding_count, count(result.num_workloads, "workload"), count(result.num_rows, "row")]
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
        yield f"{'          Repeat:':{INDENT}}harness fuzz run --replay {printable(finding.workload_file)}"
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
    token_ids = workload.requests[at].token_ids
    lengths = [_common(token_ids, earlier.token_ids) for earlier in workload.requests[:at]]
    longest = max(lengths, default=0)
    return f"{longest} with request {lengths.index(longest)}" if longest else "-"


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(first), len(second)))


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


_INVARIANCE_HEADLINES = {Outcome.MISMATCH: "BEYOND ROUNDING", Outcome.NOTHING: "NOTHING CHECKED"}
_CELLS = {Invariance.SAME: "same", Invariance.NOISE: "noise", Invariance.BEYOND: "BEYOND", Invariance.UNKNOWN: "-"}


def invariance_text(result: InvarianceResult) -> str:
    """Return the changes that were tried, and what each did to every operation."""
    return blocks_text(
        [[_headline_of_invariance(result)], _changes(result), _operations(result), _notes_on_invariance(result)]
    )


def _headline_of_invariance(result: InvarianceResult) -> str:
    states = {change.state for change in result.changes}
    word = _INVARIANCE_HEADLINES.get(result.outcome, "WITHIN ROUNDING" if Invariance.NOISE in states else "INVARIANT")
    sets = f"{count(result.num_rounds, 'set')} of prompts"
    return headline(word, result.engine, model_name(result.model), result.dtype, result.device, sets)


def _changes(result: InvarianceResult) -> list[str]:
    rows = [(change.name, change.before, change.after, *_first(change)) for change in result.changes]
    headers = ("change", "before", "after", "first operation whose bits change", "roundings")
    return table_lines(rows, headers)


def _first(change: ScheduleChange) -> tuple[str, str]:
    if not change.is_offered:
        return "(the engine does not follow it)", ""
    if change.refusal is not None:
        return printable(f"(not served: {_shortened(change.refusal)})"), ""
    if change.error is not None:
        return printable(f"(the run failed: {_shortened(change.error)})"), ""
    if change.first is None:
        return ("none" if change.state is Invariance.SAME else "(nothing could be compared)"), ""
    first = change.first
    return f"{printable(first.tap)}, request {first.request}, position {first.position}", number(first.roundings)


def _shortened(message: str) -> str:
    """Return the first line of a message, cut to the width of the column."""
    return textwrap.shorten(message.splitlines()[0], 60, placeholder=" ...")


def _operations(result: InvarianceResult) -> list[str]:
    offered = [
        change for change in result.changes if change.is_offered and change.error is None and change.refusal is None
    ]
    table = result.by_site
    if not offered or not table:
        return []
    rows = [
        (printable(site), *(_CELLS[states.get(change.name, Invariance.UNKNOWN)] for change in offered))
        for site, states in table.items()
    ]
    headers = ("operation", *(change.name.replace(" ", "\n") for change in offered))
    return table_lines(rows, headers)


def _notes_on_invariance(result: InvarianceResult) -> Iterator[str]:
    yield "same: not a bit changed where the inputs were the same. noise: bits changed, and every row is still within"
    yield "its bound. BEYOND: bits changed, and the check finds the operation wrong in one of the two runs. -: not"
    yield "recorded, or the inputs had changed already in every row."
    yield from (printable(note) for note in result.notes)
    yield f"  timings    all {number(result.elapsed_s)} s, seed {result.seed}"
    if result.was_interrupted:
        yield "  interrupted: the last set of prompts was not finished"


_POISON_HEADLINES = {
    Outcome.MISMATCH: "POISON LET IN",
    Outcome.NOTHING: "NOTHING CHECKED",
    Outcome.PASS: "NOTHING LET IN",
}


def poison_text(result: PoisonResult) -> str:
    """Return what was filled, and which operations let it in."""
    leaks = (_leak(at, leak) for at, leak in enumerate(result.leaks, start=1))
    return blocks_text(
        [[_headline_of_poison(result)], _memories(result), *leaks, _failures(result), _notes_on_poison(result)]
    )


def _headline_of_poison(result: PoisonResult) -> str:
    sets = f"{count(result.num_rounds, 'set')} of prompts"
    return headline(
        _POISON_HEADLINES[result.outcome], result.engine, model_name(result.model), result.dtype, result.device, sets
    )


def _memories(result: PoisonResult) -> list[str]:
    let_in = {leak.memory for leak in result.leaks}
    rows = [(str(memory.memory), *_cells(memory, memory.memory in let_in)) for memory in result.memories]
    headers = ("memory", "elements filled", "rows compared", "let in", "schedules")
    return table_lines(rows, headers)


def _cells(poisoned: PoisonedMemory, is_let_in: bool) -> tuple[str, str, str, str]:
    if not poisoned.num_filled:
        return "-", "-", "-", "(the engine has none, or shows none)"
    return (
        f"{poisoned.num_filled:,}",
        f"{poisoned.num_rows:,}",
        "YES" if is_let_in else "no",
        ", ".join(poisoned.schedules),
    )


def _leak(at: int, leak: Leak) -> Iterator[str]:
    whose = "" if leak.poisoned_request is None else f" ({leak.poisoned_request})"
    yield f"{at}. {leak.code}: {printable(leak.tap)} lets in {leak.memory}{whose}: {leak.memory.help}"
    yield f"   request {leak.request}, position {leak.position}, step {leak.step} ({leak.phase}), {leak.schedule}"
    yield f"   the first value that changes where the memory is filled with {', '.join(leak.values)}"
    if leak.has_weight:
        yield "   a finite value changes it, too: the memory is read, and what is read counts"
    else:
        yield "   a finite value changes nothing: as where what is read is multiplied by zero, since 0 * NaN is NaN"
    if leak.unrecorded:
        names = printable(", ".join(leak.unrecorded))
        yield f"   it may be an operation before it: the engine does not record {names}"


def _failures(result: PoisonResult) -> Iterator[str]:
    for failure in result.failures:
        what = printable(failure.error.splitlines()[0])
        yield f"{failure.memory} filled with {failure.value}, schedule {failure.schedule}: the run failed: {what}"


def _notes_on_poison(result: PoisonResult) -> Iterator[str]:
    if result.outcome is Outcome.NOTHING and not result.was_interrupted:
        yield f"no more than {Memory.SCRATCH} could be filled:"
        yield "give the engine fill_unused and fill_states (docs/fuzz.md)"
    if num_rounded := sum(memory.num_rounded for memory in result.memories):
        yield f"in {count(num_rounded, 'run')} bits of live rows changed by no more than rounding: another order of"
        yield "sums, and nothing that was let in (harness fuzz --invariance shows where)"
    yield from (printable(f"not served: {refusal}") for refusal in result.refusals)
    yield from (printable(note) for note in result.notes)
    yield f"  timings    all {number(result.elapsed_s)} s, seed {result.seed}"
    if result.was_interrupted:
        yield "  interrupted: the last set of prompts was not finished"
