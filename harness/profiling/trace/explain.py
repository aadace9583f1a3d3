"""What made a step slower, in one sentence: the largest share of the change, and what is new, gone or longer in it.

The change of a step is split into the time in which the device worked and that in which it did not. Of the first the
category of kernels with the largest change is named, of the second what the host did instead of launching.
"""

from collections.abc import Sequence
from operator import attrgetter

from harness.profiling.trace.kernels import CATEGORIES, UNCATEGORIZED
from harness.profiling.trace.steps import WAITING, WHOLE
from harness.results.trace import OperatorChange, PhaseChange, StepFigure, TraceDiff

_MOST = 0.3
"""Share of a change from which on something is its cause."""
_STALL = 1.5
"""Times the median from which on a step stalls."""
_ON_HOST = {
    "call": "{} takes {} a step", "python": "the host is in {} for {} a step", "cpu": "{} takes {} a step on the CPU",
}  # fmt: skip
_UNIFORM = 0.12
"""Categories whose times changed by factors this close to each other changed together."""


def explain(diff: TraceDiff) -> str:
    """Return the sentence on the phase that lost or won most time, or that no phase did."""
    changed = [phase for phase in diff.phases if _is_changed(phase)]
    if not changed:
        return _stalls(diff) or _nothing(diff)
    phase = max(changed, key=lambda phase: abs(_added(phase)) * phase.num_steps_after)
    step, between = phase.measure("step us"), phase.measure("between steps us")
    rows = [row for row in diff.changes if _is_of(row, phase, diff)]
    alone = " (single steps: their noise is unknown)" if step.noise is None else ""
    if phase.phase in diff.unlike:
        sizes = (next(iter(side), "steps of no stated size") for side in (phase.sizes_after, phase.sizes_before))
        cause = f"the steps are of other sizes, {' for '.join(sizes)}"
    elif abs(between.added) > abs(step.added):
        longest = _largest([row for row in diff.changes if row.phase is None], "python", "cpu", "call")
        most = f", most of it in {longest.short_name}" if longest and longest.added_us * between.added > 0 else ""
        cause = f"the host takes {_ms(between.before, between.after)} between two steps{most}"
        return f"{phase.phase} {_ms(step.before + between.before, step.after + between.after)} a step: {cause}{alone}"
    elif phase.measure("device busy us").before or phase.measure("device busy us").after:
        cause = _with_device(phase, rows)
    else:
        cause = _host(phase, rows, step.added) or "the host, outside of operators"
    return f"{phase.phase} {_ms(step.before, step.after)}: {cause}{alone}"


def _nothing(diff: TraceDiff) -> str:
    if not diff.phases:
        return "the traces have no phase in common"
    phase = max(diff.phases, key=lambda phase: phase.num_steps_before * phase.measure("step us").before)
    step = phase.measure("step us")
    noise = "" if step.noise is None else f", from run to run {_time(step.noise)}"
    return f"no step is slower: {phase.phase} {_ms(step.before, step.after)}{noise}"


def _stalls(diff: TraceDiff) -> str | None:
    """Return that some steps take far longer than the median of their phase, where they did not before."""
    for phase in diff.phases:
        sides = [
            [step.figures["step us"] for step in side.steps if step.phase == phase.phase]
            for side in (diff.before, diff.after)
        ]
        medians = phase.measure("step us").before, phase.measure("step us").after
        slow = [[us for us in side if us > _STALL * middle] for side, middle in zip(sides, medians, strict=True)]
        lost = [sum(side) - len(side) * middle for side, middle in zip(slow, medians, strict=True)]
        if lost[1] - lost[0] > 0.05 * sum(sides[1]):
            before = f"{len(slow[0])} of up to {_time(max(slow[0]))} before" if slow[0] else "none before"
            steps = f"{len(slow[1])} of the {len(sides[1])} steps of {phase.phase} stall, {before}"
            return f"{steps}: up to {_time(max(slow[1]))}, where the median is {_time(medians[1])}"
    return None


def _is_changed(phase: PhaseChange) -> bool:
    step, between = phase.measure("step us"), phase.measure("between steps us")
    is_between = between.is_change and abs(between.added) > max(0.01 * step.before, step.noise or 0.0)
    return step.is_change or is_between


def _added(phase: PhaseChange) -> float:
    return phase.measure("step us").added + phase.measure("between steps us").added


def _is_of(row: OperatorChange, phase: PhaseChange, diff: TraceDiff) -> bool:
    """Whether a row is of that phase, or of annotations within its steps, which are so if no other phase is outside."""
    return phase.phase in (WHOLE, row.phase) or (len(diff.phases) == 1 and row.phase is not None)


def _with_device(phase: PhaseChange, rows: Sequence[OperatorChange]) -> str:
    step, busy, idle = (phase.measure(name) for name in ("step us", "device busy us", "device idle us"))
    idle_share = f"; the device idles {idle.after / step.after:.0%}" if step.after else ""
    if abs(idle.added) >= _MOST * abs(step.added) and (graphs := _graphs(phase)):
        return graphs + idle_share
    if abs(idle.added) > abs(busy.added):
        when = "later" if idle.added > 0 else "earlier"
        cause = _host(phase, rows, idle.added) or f"the host launches {when}, and the trace does not show why"
        return cause + idle_share
    return _kernels(phase, rows)


def _graphs(phase: PhaseChange) -> str | None:
    """Return how graphs changed, if the launches changed with them."""
    graphs, launches = phase.measure("graph launches"), phase.measure("launches")
    if graphs.before == graphs.after or not _is_other_number(launches):
        return None
    numbers = f"{_count(launches.after)} launches for {_count(launches.before)}"
    if graphs.after and graphs.before:
        return f"{_count(graphs.after)} graphs a step for {_count(graphs.before)}, {numbers}"
    return f"graphs are {'on' if graphs.after else 'off'}, {numbers}"


def _host(phase: PhaseChange, rows: Sequence[OperatorChange], added_us: float) -> str | None:
    """Return what the host does in so much more time; None if nothing that the trace shows."""
    waiting = [row for row in rows if row.device == "call" and WAITING.match(row.name)]
    calls, launches = phase.measure("waiting calls"), phase.measure("launches")
    if calls.added * added_us > 0 and (wait := _largest(waiting, "call")):
        numbers = f"{_count(calls.after)} times a step for {_count(calls.before)}"
        return f"the host waits for the device {numbers}, in {wait.short_name}"
    rows = [row for row in rows if row not in waiting and row.added_us * added_us > 0]
    for device, words in _ON_HOST.items():
        row = _largest(rows, device)
        is_launch = device == "call" and _is_other_number(launches)
        is_of_count = device == "cpu" and row is not None and row.added_count * added_us > 0
        if row and not is_launch and (row.added_us / added_us >= _MOST or is_of_count):
            more = f"{_time(abs(row.added_us))} {'more' if row.added_us > 0 else 'less'}"
            return words.format(row.short_name, more) + _times(row)
    changed = (measure for measure in (launches, phase.measure("operators")) if measure.added * added_us > 0)
    number = next((measure for measure in changed if _is_other_number(measure)), None)
    return f"{_count(number.after)} {number.name} for {_count(number.before)}" if number else None


def _largest(rows: Sequence[OperatorChange], *devices: str) -> OperatorChange | None:
    """Return the row of some kinds whose time changed most."""
    return max((row for row in rows if row.device in devices), key=lambda row: abs(row.added_us), default=None)


def _kernels(phase: PhaseChange, rows: Sequence[OperatorChange]) -> str:
    """Return the category of kernels that changed most, and what changed in it."""
    busy = phase.measure("device busy us")
    categories = [phase.measure(f"{name} us") for name in (*CATEGORIES, UNCATEGORIZED)]
    if _changed_together(categories, busy) and not phase.measure("kernels").added:
        return f"all kernels take {busy.after / busy.before:.2g} times as long: clocks, power, or another card"
    largest = max(categories, key=lambda measure: measure.added * busy.added)
    if abs(largest.added) < _MOST * abs(busy.added):
        return (
            f"{_time(abs(busy.added))} {'more' if busy.added > 0 else 'less'} of kernels a step, of several categories"
        )
    name = largest.name.removesuffix(" us")
    kernels = [row for row in rows if row.device == "gpu" and row.category == name]
    return f"{name} {_ms(largest.before, largest.after)}, {_moved(kernels, largest)}"


def _changed_together(categories: Sequence[StepFigure], busy: StepFigure) -> bool:
    """Whether all that takes time takes longer, or shorter, by one factor."""
    factors = [measure.after / measure.before for measure in categories if measure.before > 0.05 * busy.before]
    is_common = len(factors) > 2 and max(factors) - min(factors) <= _UNIFORM * max(factors)
    return is_common and abs(factors[0] - 1) > 0.01


def _moved(rows: Sequence[OperatorChange], category: StepFigure) -> str:
    """Return which kernels are new, gone, more or longer."""
    added = max((row for row in rows if not row.count_before), key=attrgetter("added_us"), default=None)
    removed = min((row for row in rows if not row.count_after), key=attrgetter("added_us"), default=None)
    most = _MOST * abs(category.added)
    if added and removed and max(abs(added.added_us), abs(removed.added_us)) >= most:
        return f"moved from {removed.short_name} to {added.short_name}"
    longest = max(rows, key=lambda row: row.added_us * category.added, default=None)
    if longest is None:
        return "of the same kernels"
    if longest in (added, removed):
        return f"{longest.short_name} is {'new' if longest is added else 'gone'}{_times(longest)}"
    if longest.is_of_count:
        return f"{longest.short_name}{_times(longest)}"
    return f"{longest.short_name} takes {longest.self_us_after / (longest.self_us_before or 1):.2g} times as long"


def _times(row: OperatorChange) -> str:
    counts = row.count_after / row.num_steps_after, row.count_before / row.num_steps_before
    return f", {_count(counts[0])} a step for {_count(counts[1])}" if row.is_of_count else ""


def _is_other_number(measure: StepFigure) -> bool:
    return abs(measure.added) > max(0.5, 0.05 * measure.before)


def _count(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) or number >= 10 else f"{number:,.1f}"


def _ms(before_us: float, after_us: float) -> str:
    """Return two times in one unit."""
    unit, scale = ("ms", 1e3) if max(before_us, after_us) >= 100 else ("us", 1.0)
    return f"{_digits(before_us / scale)} -> {_digits(after_us / scale)} {unit}"


def _time(time_us: float) -> str:
    unit, scale = ("ms", 1e3) if time_us >= 1000 else ("us", 1.0)
    return f"{_digits(time_us / scale)} {unit}"


def _digits(value: float) -> str:
    """Return three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
