"""What can be said of any operation: a gain, rows or heads in another order, another input, a coarser dtype."""

from collections.abc import Iterator

import torch

from harness.compare.align import Rows, is_readback, step_rows
from harness.explain.hypothesis import Hypothesis
from harness.explain.scene import Scene, row_inputs
from harness.metrics import largest_rounding, rounding_unit
from harness.taps import KINDS, Kind

_MAX_POOL_ROWS = 4096
"""Rows among which a wrong one is looked for."""
_COARSE_DTYPES = (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
_ROW_WISE = (Kind.NORM, Kind.LINEAR, Kind.ROTARY)


def zero_output(scene: Scene) -> Iterator[Hypothesis]:
    """Nothing was computed."""
    yield Hypothesis(cause="the output is zero: not computed, or not loaded", output=torch.zeros_like(scene.expected))


def constant_gain(scene: Scene) -> Iterator[Hypothesis]:
    """All rows are scaled by one factor."""
    gain = float((scene.actual * scene.expected).sum() / scene.expected.square().sum())
    yield Hypothesis(cause=f"a constant gain of {gain:.6g}", output=scene.expected * gain, freedom=1)


def offset_per_channel(scene: Scene) -> Iterator[Hypothesis]:
    """The same vector is added to all rows."""
    if len(scene.rows) > 1:
        offset = (scene.actual - scene.expected).mean(dim=0)
        norm = float(offset.norm())
        yield Hypothesis(
            cause=f"a constant offset per channel, norm {norm:.3g}", output=scene.expected + offset, freedom=1
        )


def row_of_another(scene: Scene) -> Iterator[Hypothesis]:
    """Each row is what another row should be: rows in the wrong order, or the wrong row taken."""
    pool_rows = _pool_rows(scene)
    inputs = row_inputs(scene.locator, scene.operation, pool_rows) if len(pool_rows) else None
    if inputs is None or scene.operation.kind not in (*_ROW_WISE, Kind.ACTIVATION, Kind.ADD):
        return
    pool = scene.replay(inputs, pool_rows.position)
    if pool is None:
        return
    source = torch.cdist(scene.actual, pool).argmin(dim=1)
    found = pool_rows.select(source)
    pairs = [
        f"request {r}, position {p} holds that of request {other}, position {at}"
        for r, p, other, at in zip(
            scene.rows.request.tolist(), scene.rows.position.tolist(),
            found.request.tolist(), found.position.tolist(), strict=True,
        )
    ]  # fmt: skip
    shift = (found.position - scene.positions).unique()
    is_own = bool((found.request == scene.rows.request).all())
    which = f"{int(shift):+d} positions away" if is_own and len(shift) == 1 else "elsewhere"
    yield Hypothesis(
        cause=f"the row is that of another token, {which}", output=pool[source], detail="; ".join(pairs[:3]), freedom=1
    )


def _pool_rows(scene: Scene) -> Rows:
    """Rows that the operation's inputs were recorded at, those of the wrong rows' own steps first."""
    own = set(scene.rows.step.tolist())
    source = scene.operation.inputs[0] if scene.operation.inputs else scene.operation.tap
    steps = [step for step in scene.recording.steps if not is_readback(step) and step.has(source)]
    steps.sort(key=lambda step: step.index not in own)
    rows = Rows.concat([step_rows(step, source) for step in steps])
    return rows.select(torch.arange(min(len(rows), _MAX_POOL_ROWS)))


def heads_in_another_order(scene: Scene) -> Iterator[Hypothesis]:
    """Each head is what another head should be."""
    head_dim = scene.hf.head_dim
    if not KINDS[scene.operation.kind].has_heads or scene.expected.shape[1] % head_dim:
        return
    actual, expected = (
        x.unflatten(1, (-1, head_dim)).transpose(0, 1).flatten(1) for x in (scene.actual, scene.expected)
    )
    source = torch.cdist(actual, expected).argmin(dim=1)
    if torch.equal(source, torch.arange(len(source))):
        return
    output = expected[source].unflatten(1, (-1, head_dim)).transpose(0, 1).flatten(1)
    yield Hypothesis(cause=f"the heads are in another order: {source.tolist()}", output=output)


def another_input(scene: Scene) -> Iterator[Hypothesis]:
    """The operation is right, of another tensor of its layer or of the one before."""
    if scene.operation.kind not in _ROW_WISE or not scene.can_replay:
        return
    for name, other in _other_taps(scene, scene.inputs[0].flatten(1).shape):
        output = scene.replay([other], scene.positions)
        if output is not None:
            yield Hypothesis(cause=f"it reads {name} instead of {_input_site(scene)}", output=output)


def another_output(scene: Scene) -> Iterator[Hypothesis]:
    """The rows are those of another tap, as if the operation had been left out."""
    for name, other in _other_taps(scene, scene.actual.shape):
        yield Hypothesis(cause=f"the output is that of {name}", output=other, freedom=1)


def _other_taps(scene: Scene, shape: torch.Size) -> Iterator[tuple[str, torch.Tensor]]:
    layer = scene.operation.layer or 0
    for operation in scene.graph:
        if operation.tap == scene.operation.tap or operation.kind is Kind.CACHE:
            continue
        if operation.layer is None or layer - 1 <= operation.layer <= layer:
            other = scene.tap(operation.tap)
            if other is not None and other.shape == shape:
                yield operation.site if operation.layer == scene.operation.layer else operation.tap, other


def _input_site(scene: Scene) -> str:
    return scene.graph[scene.operation.inputs[0]].site


def rounded_output(scene: Scene) -> Iterator[Hypothesis]:
    """The result was rounded to a coarser dtype: every element is a number of it, within a few of its roundings."""
    for dtype in _COARSE_DTYPES:
        if rounding_unit(dtype) <= rounding_unit(scene.dtype) or not torch.equal(
            _rounded(scene.actual, dtype), scene.actual
        ):
            continue
        error = (scene.actual - scene.expected).norm(dim=1) / scene.expected.norm(dim=1)
        if float(error.max()) <= 2 * largest_rounding(dtype) * rounding_unit(dtype):
            name = str(dtype).removeprefix("torch.")
            yield Hypothesis(cause=f"the output is rounded to {name}", output=scene.actual)
            return


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).to(torch.float64)


def inputs_in_lower_precision(scene: Scene) -> Iterator[Hypothesis]:
    """The operation is right, of inputs rounded to a 16-bit dtype."""
    if scene.operation.kind not in _ROW_WISE:
        return
    for dtype in (torch.bfloat16, torch.float16):
        output = scene.replay([_rounded(x, dtype) for x in scene.inputs], scene.positions)
        if output is not None:
            yield Hypothesis(cause=f"its input is rounded to {str(dtype).removeprefix('torch.')}", output=output)


EXPLANATIONS = (
    zero_output,
    constant_gain,
    row_of_another,
    heads_in_another_order,
    another_input,
    another_output,
    rounded_output,
    inputs_in_lower_precision,
    offset_per_channel,
)
