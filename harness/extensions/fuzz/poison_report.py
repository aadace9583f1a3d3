"""What poison an engine let in, for people at a terminal: memories, then the operations that let them in."""

from collections.abc import Iterator

from harness.extensions.fuzz.poison_result import Leak, PoisonedMemory, PoisonResult
from harness.report.check.sentences import model_name, number, printable
from harness.report.check.table import count
from harness.report.terminal import blocks_text, headline, table_lines
from harness.results.check import Memory, Outcome

_HEADLINES = {Outcome.MISMATCH: "POISON LET IN", Outcome.NOTHING: "NOTHING CHECKED", Outcome.PASS: "NOTHING LET IN"}


def poison_text(result: PoisonResult) -> str:
    """Return what was filled, and which operations let it in."""
    leaks = (_leak(at, leak) for at, leak in enumerate(result.leaks, start=1))
    return blocks_text([[_headline(result)], _memories(result), *leaks, _failures(result), _notes(result)])


def _headline(result: PoisonResult) -> str:
    sets = f"{count(result.num_rounds, 'set')} of prompts"
    return headline(
        _HEADLINES[result.outcome], result.engine, model_name(result.model), result.dtype, result.device, sets
    )


def _memories(result: PoisonResult) -> list[str]:
    let_in = {leak.memory for leak in result.leaks}
    rows = [(str(memory.memory), *_cells(memory, memory.memory in let_in)) for memory in result.memories]
    headers = ("memory", "elements filled", "rows compared", "let in", "schedules")
    return table_lines(rows, headers)


def _cells(each: PoisonedMemory, is_let_in: bool) -> tuple[str, str, str, str]:
    if not each.num_filled:
        return "-", "-", "-", "(the engine has none, or shows none)"
    return f"{each.num_filled:,}", f"{each.num_rows:,}", "YES" if is_let_in else "no", ", ".join(each.schedules)


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


def _notes(result: PoisonResult) -> Iterator[str]:
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
