"""Ways to get a state wrong that goes on from row to row: its decay, its parameters, where it begins."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby, pairwise
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from harness.formats.recording import RequestInfo
from harness.formats.taps import Kind
from harness.judge.compare.align import Rows
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.formats import HALF_DTYPES, name_of, rounded
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.judge.explain.core.rerun import replaced
from harness.judge.explain.experts.mixture import exactly
from harness.judge.explain.states.recurrence import Convolved, Recurrence, history, recurrence_of

_LOGARITHMS = ("A_log",)
"""Parameters whose exponential, with the sign turned, is the rate of the decay."""
_MAX_NEWTON_STEPS = 6
_NAMED = 1e-3
"""Distance up to which a fitted factor is one that has a name."""
_SMALL = 1e-4
"""Step by which a derivative is taken."""


def wrong_state(failure: Failure) -> Iterator[Hypothesis]:
    """The scan, or the convolution before it, begins elsewhere or computes with other numbers."""
    recurrence = recurrence_of(failure)
    if recurrence is None:
        return
    yield from _begun_elsewhere(recurrence)
    yield from _kept_coarsely(recurrence)
    for path, name, parameter in _parameters(recurrence):
        yield from _other_values(recurrence, path, name, parameter)
    yield from _sign_of_decay(recurrence)


def _begun_elsewhere(recurrence: Recurrence) -> Iterator[Hypothesis]:
    """The state is not carried on, or not kept up to date, or it is what another request left."""
    patterns: dict[str, Callable[[Rows], list[Rows]]] = {
        "{state} is not carried from one step to the next": _by_step,
        "{state} of the prefill is not carried into decode": _prefill_and_decode,
        "{state} is not updated in decode: every row goes on from the end of the first step": _frozen,
        "{state} is a step late: the rows of the step before are not in it": _a_step_late,
        "{state} takes in the last row of the step before twice": _doubled,
    }
    if _any_within_a_step(recurrence.failure.rows):  # or there would be no difference to steps
        patterns["no {state} is carried from row to row"] = _row_by_row
    right = recurrence.convolved()
    for cause, pattern in patterns.items():
        yield from _of_sequences(
            recurrence, [item for rows in recurrence.histories for item in pattern(rows)], cause, right
        )
    for request in recurrence.failure.recording.manifest.requests:
        yield from _left_by(recurrence, request, right)


def _kept_coarsely(recurrence: Recurrence) -> Iterator[Hypothesis]:
    """The state, or a part of it, is rounded to a 16-bit dtype after each step."""
    with suppress(AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        right = recurrence.run_by_steps(lambda _name, state: state)
        if not recurrence.failure.is_expected(right):
            return  # run step by step, HF's mixer gives something else
        states = {"the recurrence's state": ("recurrent",), "the convolution's state": ("conv",)}
        for label, names in {"the state": ("conv", "recurrent"), **states}.items():
            for dtype in HALF_DTYPES:

                def kept(
                    name: str, state: torch.Tensor, names: tuple[str, ...] = names, dtype: torch.dtype = dtype
                ) -> torch.Tensor:
                    return rounded(state, dtype) if name in names else state

                output = recurrence.run_by_steps(kept)
                if output is not None and right is not None and not torch.equal(output, right):
                    cause = f"{label} is kept in {name_of(dtype)} from one step to the next"
                    yield Hypothesis(cause=cause, output=output)


def _left_by(recurrence: Recurrence, request: RequestInfo, right: Convolved) -> Iterator[Hypothesis]:
    others = [rows for rows in recurrence.histories if int(rows.request[0]) != request.id]
    left = history(recurrence.failure, request.id, len(request.token_ids) - 1)
    if others and bool((left.step >= 0).all()):
        joined = [Rows.concat([left, rows]) for rows in others]
        own = [rows for rows in recurrence.histories if int(rows.request[0]) == request.id]
        cause = f"{{state}} begins with what request {request.id} left, instead of with zero"
        yield from _of_sequences(recurrence, [*own, *joined], cause, right)


def _of_sequences(recurrence: Recurrence, sequences: list[Rows], cause: str, right: Convolved) -> Iterator[Hypothesis]:
    """All of the state is of other rows, or that of the convolution alone, or all but that.

    Args:
        recurrence: of the layer.
        sequences: of rows that follow each other, as far as the wrong state goes.
        cause: with a place for what state it is.
        right: what the convolutions should give.
    """
    wrong: Convolved = {}
    found = {"the state": recurrence.run(sequences, seen=wrong)}
    if right.keys() <= wrong.keys() and right:
        found["the convolution's state"] = recurrence.run(convolved=wrong)
        found["the recurrence's state"] = recurrence.run(sequences, convolved=right)
    expected, told = recurrence.failure.expected, list[torch.Tensor]()
    for state, output in reversed(found.items()):
        if output is not None and not any(torch.equal(output, item) for item in (expected, *told)):
            told.append(output)
            yield Hypothesis(cause=cause.format(state=state).replace("no the ", "no "), output=output)


def _by_step(rows: Rows) -> list[Rows]:
    return [_pick(rows, list(group)) for _, group in groupby(range(len(rows)), key=lambda at: int(rows.step[at]))]


def _prefill_and_decode(rows: Rows) -> list[Rows]:
    """Cut a request's rows where its steps begin to have one row only."""
    pieces = _by_step(rows)
    first = next((at for at in range(len(pieces), 0, -1) if len(pieces[at - 1]) > 1), 0)
    return [Rows.concat(item) for item in (pieces[:first], pieces[first:]) if item]


def _any_within_a_step(rows: Rows) -> bool:
    """Whether some row comes after another one of its request in its step."""
    places = list(zip(rows.request.tolist(), rows.step.tolist(), strict=True))
    return len(set(places)) < len(places)


def _row_by_row(rows: Rows) -> list[Rows]:
    return [_pick(rows, [at]) for at in range(len(rows))]


def _frozen(rows: Rows) -> list[Rows]:
    """The rows of the first step, and every later row as if it came next."""
    first, *later = _by_step(rows)
    return [first, *(Rows.concat([first, _pick(step, [at])]) for step in later for at in range(len(step)))]


def _a_step_late(rows: Rows) -> list[Rows]:
    """The rows of a step after those of all steps but the one before."""
    steps = _by_step(rows)
    return [Rows.concat([*steps[: max(at - 1, 0)], step]) for at, step in enumerate(steps)]


def _doubled(rows: Rows) -> list[Rows]:
    """The rows of a step after those of the steps before, the last of which is there twice."""
    steps = _by_step(rows)
    pieces = [steps[0]]
    for before, step in pairwise(steps):
        pieces.append(Rows.concat([pieces[-1], _pick(before, [len(before) - 1]), step]))
    return pieces


def _pick(rows: Rows, places: list[int]) -> Rows:
    return rows.select(torch.tensor(places))


def _parameters(recurrence: Recurrence) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Yield path, name and values of what the mixer computes with by itself: what no other operation shows."""
    failure = recurrence.failure
    shown = {op.module for op in failure.graph if op.kind in (Kind.LINEAR, Kind.NORM)}
    for inner, module in recurrence.module.named_modules():
        path = f"{recurrence.path}.{inner}" if inner else recurrence.path
        if path not in shown:
            for name, parameter in module.named_parameters(recurse=False):
                yield path, name, parameter


def _other_values(recurrence: Recurrence, path: str, name: str, parameter: torch.nn.Parameter) -> Iterator[Hypothesis]:
    own, label = parameter.data, f"{path.removeprefix(recurrence.path).lstrip('.')}.{name}".lstrip(".")
    tried = {f"{label} is zero: left out, or not loaded": torch.zeros_like(own), f"the sign of {label} is wrong": -own}
    if recurrence.failure.dtype not in HALF_DTYPES:
        tried |= {f"{label} is rounded to {name_of(dtype)}": rounded(own, dtype) for dtype in HALF_DTYPES}
    tried |= {f"{label} is that of layer {layer}": other for layer, other in _of_other_layers(recurrence, path, name)}
    for cause, values in tried.items():
        if values.shape == own.shape and not torch.equal(values, own):
            with replaced(parameter, "data", values):
                output = recurrence.run()
            if output is not None:
                yield Hypothesis(cause=cause, output=output)
    yield from _fitted(recurrence, parameter, label)


def _fitted(recurrence: Recurrence, parameter: torch.nn.Parameter, label: str) -> Iterator[Hypothesis]:
    """The parameter is scaled, or the decay is whose logarithm it is."""
    own = parameter.data
    factor, output = _best(recurrence, parameter, lambda size: own * (1 + size))
    if output is not None and min(abs(1 + factor - named) for named in (-1, 0, 1)) > _NAMED:
        yield Hypothesis(cause=f"{label} is scaled by {1 + factor:.4g}", output=output, freedom=1)
    if label.rpartition(".")[2] in _LOGARITHMS:
        shift, output = _best(recurrence, parameter, lambda size: own + size)
        if output is not None and abs(shift) > _SMALL:
            cause = f"the decay of the state is scaled by {math.exp(shift):.4g}"
            yield Hypothesis(cause=cause, output=output, freedom=1)


def _best(recurrence: Recurrence, parameter: torch.nn.Parameter, change: Any) -> tuple[float, torch.Tensor | None]:
    """Return the size of a change under which the output is nearest, and the output (Gauss-Newton, one number)."""
    size, actual = 0.0, recurrence.failure.actual
    for _ in range(_MAX_NEWTON_STEPS):
        outputs = []
        for item in (size, size + _SMALL):
            with replaced(parameter, "data", change(item)):
                outputs.append(recurrence.run())
        here, there = outputs
        if here is None or there is None or not bool(here.isfinite().all()):
            return 0.0, None
        slope = (there - here) / _SMALL
        energy = float(slope.square().sum())
        if energy == 0:
            return 0.0, None
        step = float(((actual - here) * slope).sum()) / energy
        size += max(-1.0, min(1.0, step))
        if abs(step) < _SMALL * _SMALL:
            break
    with replaced(parameter, "data", change(size)):
        return size, recurrence.run()


def _of_other_layers(recurrence: Recurrence, path: str, name: str) -> Iterator[tuple[int, torch.Tensor]]:
    failure = recurrence.failure
    part = failure.hf.part_of(path)
    for operation in failure.graph:
        if operation.site == failure.operation.site and operation.layer not in (None, failure.operation.layer):
            other = failure.hf.part_of(operation.module)
            with failure.hf.weights.held(other):
                module = failure.hf.module(other + path.removeprefix(part))
                yield int(operation.layer or 0), getattr(module, name).detach().to(torch.float64)


def _sign_of_decay(recurrence: Recurrence) -> Iterator[Hypothesis]:
    """The rate is exp(A_log) where it should be -exp(A_log): the state grows."""
    for name in _LOGARITHMS:
        parameter = getattr(recurrence.module, name, None)
        if parameter is not None:
            with exactly(recurrence.failure), _TurnedExponential(parameter):
                output = recurrence.run()
            if output is not None and bool(output.isfinite().all()):
                yield Hypothesis(cause="the sign of the state's decay is wrong: the state grows", output=output)


class _TurnedExponential(TorchFunctionMode):
    """Turns the sign of the exponential of one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_exponential = func in (torch.exp, torch.Tensor.exp)
        return -result if is_exponential and args[0] is self._tensor else result


EXPLANATIONS = (wrong_state,)
