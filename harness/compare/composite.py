"""Local judgement where an engine records less than every operation: replay from the nearest taps that it did record.

What lies between is computed in float64 and not compared. So an engine that shows only the outputs of its layers is
judged layer by layer, one that shows the attention module's input and output by that module, and so on: the finest
that the recording allows. The same way computed with every value between rounded to the engine's dtype says how much
rounding may do there.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from harness.compare.align import Rows, is_readback, step_rows, take
from harness.compare.bounds import ERROR_MODELS
from harness.compare.history import attention_inputs
from harness.compare.local import LocalErrors
from harness.compare.prefixes import Prefixes
from harness.compare.shapes import engine_dtype
from harness.metrics import largest_rounding, rounding_unit, row_metrics
from harness.oracle.precision import TRUTH_DTYPE
from harness.oracle.replay import Replayer
from harness.recording import Recording, Step
from harness.taps import DecoderGraph, Kind, Operation

_NOISE_FACTOR = 10.0
"""Largest ratio of a row's error to that of the rounded way: as for propagation, which this is in part."""


_ACCUMULATION = 10.0
"""Errors of a float32 sum, in roundings of the accumulator (5.6 in the median, 17 at most, for linear modules)."""


class _Filled(Step):
    """A step with taps that were computed rather than recorded."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.computed: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._step, name)

    def has(self, name: str) -> bool:
        """Whether the step holds the tap, recorded or computed."""
        return name in self.computed or self._step.has(name)

    def tap(self, name: str) -> torch.Tensor:
        """Return the tap, recorded or computed."""
        return self.computed[name] if name in self.computed else self._step.tap(name)

    def rows_of(self, name: str) -> torch.Tensor | None:
        """Return which rows the tap covers; one that was computed covers all."""
        return None if name in self.computed else self._step.rows_of(name)


def composite_errors(
    recording: Recording, graph: DecoderGraph, usable: set[str], replayer: Replayer
) -> Iterator[tuple[Operation, LocalErrors]]:
    """Judge every recorded tap one of whose inputs was not recorded, from the nearest taps that were.

    Args:
        recording: the engine's.
        graph: of the decoder, all of it.
        usable: recorded taps whose shape and dtype fit.
        replayer: the oracle's operations.
    """
    through = _ways(graph, usable)
    if not through:
        return
    steps = [step for step in recording.steps if not is_readback(step)]
    exact, rounded = ([_Filled(step) for step in steps] for _ in range(2))
    needed = {tap for taps in through.values() for tap in taps}
    prefixes, dtype = Prefixes(recording.manifest.requests), engine_dtype(recording)
    for layer, operations in groupby(graph, key=lambda operation: operation.layer):
        with replayer.layer(layer):
            for operation in operations:
                if operation.tap in needed:
                    _fill(operation, exact, replayer, prefixes, TRUTH_DTYPE)
                    _fill(operation, rounded, replayer, prefixes, dtype)
                elif operation.tap in through:
                    errors = _judge(operation, exact, rounded, replayer, prefixes, dtype, through[operation.tap])
                    if errors is not None:
                        yield operation, errors


def _ways(graph: DecoderGraph, usable: set[str]) -> dict[str, tuple[str, ...]]:
    """For each tap to be judged, the taps that are computed on the way to it, in graph order."""
    by_tap, ways = graph.by_tap(), dict[str, tuple[str, ...]]()
    for operation in graph:
        if operation.tap in usable and operation.kind is not Kind.CACHE and not set(operation.inputs) <= usable:
            found: set[str] = set()
            pending = [tap for tap in operation.inputs if tap not in usable]
            while pending:
                tap = pending.pop()
                if tap not in found:
                    found.add(tap)
                    pending += [each for each in by_tap[tap].inputs if each not in usable]
            if all(by_tap[tap].inputs for tap in found):  # else the way leads back to the tokens: that is propagation
                ways[operation.tap] = tuple(each.tap for each in graph if each.tap in found)
    return ways


def _fill(
    operation: Operation, steps: Sequence[_Filled], replayer: Replayer, prefixes: Prefixes, dtype: torch.dtype
) -> None:
    """Compute a tap that was not recorded, at all rows of each step, and round it to `dtype`."""
    for step, _, values in _computed(operation, steps, replayer, prefixes):
        if step.rows_of(operation.inputs[0]) is None:
            step.computed[operation.tap] = values.to(dtype)


def _judge(
    operation: Operation,
    exact: Sequence[_Filled],
    rounded: Sequence[_Filled],
    replayer: Replayer,
    prefixes: Prefixes,
    dtype: torch.dtype,
    through: tuple[str, ...],
) -> LocalErrors | None:
    unit, rows, errors, noise = rounding_unit(dtype), list[Rows](), list[torch.Tensor](), list[torch.Tensor]()
    coarse = {step.index: values for step, _, values in _computed(operation, rounded, replayer, prefixes)}
    for step, own, values in _computed(operation, exact, replayer, prefixes):
        if not step.has(operation.tap):
            continue
        metrics = row_metrics(step.tap(operation.tap).flatten(1), values.flatten(1))
        rows.append(own)
        errors.append(torch.where(metrics.is_finite, metrics.relative_l2 / unit, torch.inf))
        noise.append(row_metrics(coarse[step.index].flatten(1), values.flatten(1)).relative_l2 / unit)
    if not rows:
        return None
    roundings, level = torch.cat(errors), torch.cat(noise)
    # The rounded way has no errors of accumulation: in float32 they are what there is most of.
    fine, model = rounding_unit(torch.float32) / unit, ERROR_MODELS[operation.kind]
    floor = model.roundings * largest_rounding(dtype) + model.accumulation * fine
    factor = _NOISE_FACTOR * (1 + _ACCUMULATION * fine)
    bound = floor + factor * level.clamp(min=float(level.nanmedian())).nan_to_num(0.0)
    return LocalErrors(
        rows=Rows.concat(rows),
        roundings=roundings,
        bound=bound,
        bad=roundings > bound,
        exact=bool((roundings == 0).all()),
        through=through,
    )


def _computed(
    operation: Operation, steps: Sequence[_Filled], replayer: Replayer, prefixes: Prefixes
) -> Iterator[tuple[_Filled, Rows, torch.Tensor]]:
    """Yield the operation's rows of each step that has its inputs, [rows, ...] float64."""
    ready = [step for step in steps if all(step.has(tap) for tap in operation.inputs)]
    if operation.kind is Kind.ATTENTION:
        yield from _attention(operation, ready, replayer, prefixes)
        return
    for step in ready:
        source = operation.tap if step.has(operation.tap) else operation.inputs[0]
        own, covered = step_rows(step, source), step.rows_of(source)
        taken = [take(step, tap, covered) for tap in operation.inputs]
        if len(own) and all(found is None or bool(found.all()) for _, found in taken):
            inputs = [tensor for tensor, _ in taken]
            yield step, own, replayer.replay(operation, inputs, own.position).expected.cpu().flatten(1)


def _attention(
    operation: Operation, steps: Sequence[_Filled], replayer: Replayer, prefixes: Prefixes
) -> Iterator[tuple[_Filled, Rows, torch.Tensor]]:
    """Attention over histories that span the steps, put back in the order of each step's rows."""
    width = next((step.tap(operation.inputs[0]).flatten(1).shape[1] for step in steps), 0)
    outputs = {step.index: torch.full((len(step.request), width), torch.nan, dtype=TRUTH_DTYPE) for step in steps}
    with_place = [_placed(step, operation.tap) for step in steps]
    for rows, places, inputs in attention_inputs(operation, with_place, prefixes):
        values = replayer.attention(operation.layer or 0, inputs).expected.cpu()
        for at, step in enumerate(rows.step.tolist()):
            outputs[step][int(places[at])] = values[at]
    for step in steps:
        if not bool(outputs[step.index].isnan().any()):
            yield step, step_rows(step, operation.inputs[0]), outputs[step.index]


def _placed(step: _Filled, tap: str) -> _Filled:
    """Return the step with each row's own number in the place of a tap."""
    placed = _Filled(step)
    placed.computed = {tap: torch.arange(len(step.request))}
    return placed
