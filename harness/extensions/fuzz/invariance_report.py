"""Changes of schedule that change bits, for people at a terminal: operations against changes."""

import textwrap
from collections.abc import Iterator

from harness.extensions.fuzz.invariance_result import Invariance, InvarianceResult, ScheduleChange
from harness.report.check.sentences import model_name, number, printable
from harness.report.check.table import count
from harness.report.terminal import blocks_text, headline, table_lines
from harness.results.check import Outcome

_HEADLINES = {Outcome.MISMATCH: "BEYOND ROUNDING", Outcome.NOTHING: "NOTHING CHECKED"}
_CELLS = {Invariance.SAME: "same", Invariance.NOISE: "noise", Invariance.BEYOND: "BEYOND", Invariance.UNKNOWN: "-"}


def invariance_text(result: InvarianceResult) -> str:
    """Return the changes that were tried, and what each did to every operation."""
    return blocks_text([[_headline(result)], _changes(result), _operations(result), _notes(result)])


def _headline(result: InvarianceResult) -> str:
    states = {change.state for change in result.changes}
    word = _HEADLINES.get(result.outcome, "WITHIN ROUNDING" if Invariance.NOISE in states else "INVARIANT")
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


def _notes(result: InvarianceResult) -> Iterator[str]:
    yield "same: not a bit changed where the inputs were the same. noise: bits changed, and every row is still within"
    yield "its bound. BEYOND: bits changed, and the check finds the operation wrong in one of the two runs. -: not"
    yield "recorded, or the inputs had changed already in every row."
    yield from (printable(note) for note in result.notes)
    yield f"  timings    all {number(result.elapsed_s)} s, seed {result.seed}"
    if result.was_interrupted:
        yield "  interrupted: the last set of prompts was not finished"
