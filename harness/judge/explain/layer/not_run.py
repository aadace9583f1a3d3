"""Layers of which nothing was recorded: the operation after them tells whether they ran."""

import torch

from harness.base.metrics import rounding_unit
from harness.formats.taps import Operation
from harness.judge.compare.align import Locator
from harness.judge.compare.row_judge import LocalErrors
from harness.judge.explain.core.failure import gathered
from harness.judge.explain.core.operations import replay
from harness.oracle.model import HFModel
from harness.results.check import Explanation

_FALL = 0.5
_MAX_ROWS = 192


def layers_that_did_not_run(
    operation: Operation, errors: LocalErrors, hf: HFModel, locator: Locator, dtype: torch.dtype, scope: str
) -> Explanation | None:
    """Explain an operation that stands after layers of which nothing was recorded; None if it stands elsewhere."""
    computed = {op.tap for op in hf.graph if not op.is_kept} & set(locator.taps())
    silent = [layer for layer in hf.graph.layers if not any(op.tap in computed for op in hf.graph.of_layer(layer))]
    layers = sorted({layer for layer in silent for op in hf.graph.of_layer(layer) if op.tap in errors.unrecorded})
    if not layers:
        return None
    names = f"layer {layers[0]}" if len(layers) == 1 else f"layers {', '.join(map(str, layers))}"
    rows = errors.rows.select(errors.bad.nonzero()[:_MAX_ROWS, 0])
    before = hf.graph.of_layer(layers[0])[0].inputs[0]
    actual, stream = gathered(locator, operation.tap, rows), gathered(locator, before, rows)
    given = None if stream is None else replay(hf, operation, [stream])
    roundings, bound = errors.roundings[errors.bad][:_MAX_ROWS], errors.bound[errors.bad][:_MAX_ROWS].clamp(min=1)
    residual = torch.full_like(roundings, torch.inf)
    if given is not None and actual is not None and given.shape == actual.shape:
        residual = (actual - given).norm(dim=1) / given.norm(dim=1) / rounding_unit(dtype)
    holds = (residual <= bound) & (residual <= _FALL * roundings)
    did_not_run = bool(holds.float().mean() > _FALL)
    nothing = f"nothing of {names} was recorded"
    return Explanation(
        cause=f"{names} did not run: {nothing}, and this fits {before}" if did_not_run else nothing,
        scope=scope,
        residual_before=float(roundings.median()),
        residual_after=float(residual[holds].median()) if did_not_run else None,
        num_rows=len(rows),
        num_explained=int(holds.sum()) if did_not_run else 0,
        is_cause=did_not_run,
    )
