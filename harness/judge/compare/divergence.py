"""The first operation in the order of the run that is wrong, at its first wrong row."""

from collections.abc import Collection, Sequence

import torch

from harness.errors import Code
from harness.formats.recording import Recording
from harness.formats.taps import Graph, Kind
from harness.judge.compare.align import step_rows
from harness.judge.compare.judged import TapJudgement
from harness.results.check import Divergence, Verdict


def first_divergence(
    judged: Sequence[TapJudgement], misshapen: Collection[str], graph: Graph, actual: Recording
) -> Divergence | None:
    """Describe the first operation that is wrong: by its values, or by a shape that cannot be judged."""
    order = {operation.tap: at for at, operation in enumerate(graph)}
    shape = min((tap for tap in misshapen if tap in order), key=order.__getitem__, default=None)
    wrong = _state_before(next((item for item in judged if item.is_wrong), None), judged)
    if shape is not None and (wrong is None or order[shape] < order.get(wrong.operation.tap, len(order))):
        return _of_shape(shape, actual) or (None if wrong is None else _of_values(wrong, actual))
    return None if wrong is None else _of_values(wrong, actual)


def _state_before(wrong: TapJudgement | None, judged: Sequence[TapJudgement]) -> TapJudgement | None:
    """Return the state that was wrong before the first wrong operation of its layer: what goes on from it, is, too."""
    if wrong is None or not wrong.is_bad:
        return wrong
    first = int(wrong.rows.step[wrong.bad].min())
    states = (
        item
        for item in judged
        if item.operation.kind is Kind.STATE and item.operation.layer == wrong.operation.layer and item.is_bad
    )
    return next((state for state in states if int(state.rows.step[state.bad].min()) < first), wrong)


def _of_values(judged: TapJudgement, actual: Recording) -> Divergence:
    """Describe the first bad row of a wrong tap, or the first row of all if none is bad by itself."""
    errors = judged.errors
    at = judged.first_bad if judged.is_bad else judged.rows.first(torch.ones(len(judged.rows), dtype=torch.bool))
    step = int(judged.rows.step[at])
    return Divergence(
        tap=judged.operation.tap,
        request=int(judged.rows.request[at]),
        position=int(judged.rows.position[at]),
        verdict=judged.verdict,
        code=judged.code,
        local_roundings=None if errors is None else float(errors.roundings[at]),
        bound_roundings=None if errors is None else float(errors.bound[at]),
        propagated_ratio=judged.ratio_at(at),
        schedule=actual.manifest.schedule,
        step=step,
        phase=actual.steps[step].phase,
    )


def _of_shape(tap: str, actual: Recording) -> Divergence | None:
    """Describe the first row of a tap whose values cannot be compared; None if it has no row."""
    found = ((step, step_rows(step, tap)) for step in actual.steps if tap in step.tap_names)
    step, rows = next(((step, rows) for step, rows in found if len(rows)), (None, None))
    if step is None or rows is None:
        return None
    return Divergence(
        tap=tap,
        request=int(rows.request[0]),
        position=int(rows.position[0]),
        verdict=Verdict.BUG,
        code=Code.TAP_MISMATCH,
        schedule=actual.manifest.schedule,
        step=step.index,
        phase=step.phase,
    )
