"""A state that goes from row to row is wrong: where it begins, and the format that it is kept in.

A state-space or linear-attention layer reads its inputs at all earlier rows. So HF's own mixer of the layer is run
again over the recorded rows, with the recorded inner values put in place, and with one thing changed.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from harness.formats.recording import RequestInfo
from harness.formats.taps import KINDS, Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.explain.core.formats import HALF_DTYPES, name_of, rounded
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation, gathered
from harness.oracle.caches import MIXER_CACHES, new_cache
from harness.oracle.paired import PartCall, run_as_far_as
from harness.oracle.watch import Watch

_SAME = 1e-4
"""Relative distance within which the module, run again, gives what it should."""
_NEARER = 0.5
"""Share of the error that a mistake leaves at most to be tried on the rows of all requests."""
Sequences = Sequence[Rows]
_Row = tuple[int, int]
"""(request, position)."""
Convolved = dict[tuple[int, _Row], torch.Tensor]
"""[C] that a convolution gives at a row, by the number of the convolution in the order of the run."""


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """A mixer and the rows of the requests that it is run over."""

    wrong: WrongOperation
    watch: Watch
    path: str
    """Of the mixer."""
    entry: str
    """Tap that the mixer reads."""
    histories: tuple[Rows, ...]
    """Every request's rows from its first to its last wrong one."""

    @property
    def module(self) -> nn.Module:
        """HF's mixer."""
        return self.wrong.hf.module(self.path)

    def run(
        self, sequences: Sequences | None = None, *, convolved: Convolved | None = None, seen: Convolved | None = None
    ) -> torch.Tensor | None:
        """Return what the operation gives at the wrong rows, [R, W] float64, if rows follow each other as given.

        Args:
            sequences: of rows, each begun with an empty state; those of every request in order by default. A row that
                is there twice counts where it is last. None is returned where a row was not recorded.
            convolved: what the convolutions of the mixer give at each row, in the place of what they would give.
            seen: is given what they gave.
        """
        outputs: dict[_Row, torch.Tensor] = {}
        for rows in self.histories if sequences is None else sequences:
            with _Convolutions(rows.places(), convolved, seen):
                output = self._run_one(rows)
            if output is None:
                return None
            outputs |= output
        return self._at_wrong_rows(outputs)

    def run_by_steps(self, kept: Callable[[str, torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        """Return what the operation gives if the state goes through `kept` after each step: [R, W] float64.

        Args:
            kept: from `conv` or `recurrent`, and a state, to what is kept of it.

        None where a row was not recorded, or the mixer keeps its state otherwise than HF's cache does.
        """
        outputs: dict[_Row, torch.Tensor] = {}
        for rows in self.histories:
            cache = new_cache(self.wrong.hf)
            if cache is None:
                return None
            layer = cache.layers[self.module.layer_idx]
            for step in by_step(rows):
                output = self._run_one(step, cache)
                if output is None:
                    return None
                outputs |= output
                for name in ("conv", "recurrent"):
                    for state in getattr(layer, f"{name}_states", {}).values():
                        if state is not None:
                            state.copy_(kept(name, state))
        return self._at_wrong_rows(outputs)

    def of_shortest(self) -> "Recurrence":
        """Return the same of the request with the shortest history alone."""
        rows = min(self.histories, key=len)
        wrong = self.wrong.select(self.wrong.rows.request == rows.request[0])
        return replace(self, wrong=wrong, histories=(rows,))

    def is_near(self, hypothesis: Hypothesis) -> bool:
        """Whether what a mistake gives comes nearer to the engine's rows than what is right, all rows together."""
        left, error = ((x - self.wrong.actual).norm() for x in (hypothesis.output, self.wrong.expected))
        return bool(left < _NEARER * error)

    def convolved(self) -> Convolved:
        """Return what the mixer's convolutions give at each row; empty without any.

        A row that is there twice counts where it is last.
        """
        seen: Convolved = {}
        self.run(seen=seen)
        return seen

    def _run_one(self, rows: Rows, cache: Any = None) -> dict[_Row, torch.Tensor] | None:
        """Return what the operation gives at rows that follow each other; None if one was not recorded."""
        values = self.recorded(rows)
        return None if values is None else dict(zip(rows.places(), self.run_on(rows, values, cache), strict=True))

    def recorded(self, rows: Rows) -> dict[str, torch.Tensor] | None:
        """Return what the engine recorded of what the mixer and the operation read; None if a row of it is missing."""
        values = dict[str, torch.Tensor]()
        for tap in (self.entry, *self.wrong.operation.inputs):
            if (recorded := gathered(self.wrong.locator, tap, rows)) is None:
                return None
            values[tap] = recorded.to(self.wrong.hf.device)
        return values

    def run_on(self, rows: Rows, values: dict[str, torch.Tensor], cache: Any = None) -> torch.Tensor:
        """Return what the operation gives at rows that follow each other, with recorded values put back."""
        hf, tap = self.wrong.hf, self.wrong.operation.tap
        arguments = _arguments(self.module, rows.position.to(hf.device), cache)
        call = PartCall(path=self.path, args=(values[self.entry][None],), kwargs=arguments)
        return run_as_far_as(tap, hf, self.watch, call, (1, len(rows)), lambda value: values.get(value.operation.tap))

    def _at_wrong_rows(self, outputs: dict[_Row, torch.Tensor]) -> torch.Tensor | None:
        wanted = self.wrong.rows.places()
        return torch.stack([outputs[row] for row in wanted]) if outputs.keys() >= set(wanted) else None


def recurrence_of(wrong: WrongOperation) -> Recurrence | None:
    """Return the mixer behind an operation; None if it has none that gives what it should on the recorded rows."""
    path = _mixer_of(wrong)
    if path is None or wrong.rerun is None:
        return None
    first = _first_of(wrong, path)
    if first is None:
        return None
    last: dict[int, int] = {}
    for request, position in wrong.rows.places():
        last[request] = max(position, last.get(request, 0))
    histories = tuple(history(wrong, request, count + 1) for request, count in last.items())
    recurrence = Recurrence(wrong=wrong, watch=wrong.rerun.watch, path=path, entry=first.inputs[0], histories=histories)
    try:
        output = recurrence.run()
    except Exception:  # a module of HF's that needs more than its rows: nothing is known of it
        return None
    if output is None or output.shape != wrong.expected.shape:
        return None
    if bool(((output - wrong.expected).norm(dim=1) > _SAME * wrong.expected.norm(dim=1)).any()):
        return None
    return recurrence


def history(wrong: WrongOperation, request: int, count: int) -> Rows:
    """Return the first rows of a request, each in the step that computed it last."""
    position = torch.arange(count)
    rows = Rows(request=torch.full_like(position, request), position=position, step=torch.zeros_like(position))
    places = wrong.locator.find(wrong.operation.inputs[0], rows)
    return Rows(request=rows.request, position=position, step=places[:, 0])


def _mixer_of(wrong: WrongOperation) -> str | None:
    """Return the innermost module around the operation with parameters that no other operation shows.

    None if there is none, or attention stands in it.
    """
    shown = {op.module for op in wrong.graph if op.kind in (Kind.LINEAR, Kind.NORM)}
    path = wrong.operation.module
    while path:
        module = wrong.module_at(path)
        paths = {f"{path}.{name}".rstrip(".") for name, inner in module.named_modules() if inner._parameters}
        if not isinstance(module, nn.Linear) and len(list(module.children())) > 1 and paths - shown:
            return None if any(KINDS[op.kind].has_heads for op in _inside(wrong, path)) else path
        path = path.rpartition(".")[0]
    return None


def _inside(wrong: WrongOperation, path: str) -> list[Operation]:
    return [op for op in wrong.graph if op.source and f"{op.module}.".startswith(f"{path}.")]


def _first_of(wrong: WrongOperation, path: str) -> Operation | None:
    """Return the first operation of a mixer: one that reads what the mixer reads."""
    inside = _inside(wrong, path)
    return inside[0] if inside and len(inside[0].inputs) == 1 else None


def _arguments(module: nn.Module, positions: torch.Tensor, cache: Any) -> dict[str, Any]:
    """Return what a mixer asks for besides its rows: their positions, no mask, and the state of before, if any."""
    known = {"position_ids": positions[None], "attention_mask": None, "use_cache": cache is not None}
    if cache is not None:
        known |= dict.fromkeys(MIXER_CACHES, cache)
    asked = inspect.signature(module.forward).parameters
    return {name: value for name, value in known.items() if name in asked}


class _Convolutions(TorchFunctionMode):
    """Sees what convolutions over the rows of a sequence give, or puts something else in its place."""

    def __init__(self, rows: list[_Row], forced: Convolved | None, seen: Convolved | None) -> None:
        super().__init__()
        self._rows, self._forced, self._seen, self._num_calls = rows, forced, seen, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is not torch.conv1d or output.shape[-1] < len(self._rows):
            return output
        call, self._num_calls = self._num_calls, self._num_calls + 1
        if self._forced is not None:
            rows = enumerate(self._rows)  # what another request left behind is not among the rows that were given
            forced = torch.stack([self._forced.get((call, row), output[0, :, at]) for at, row in rows], dim=-1)
            output = torch.cat((forced[None].to(output), output[..., len(self._rows) :]), dim=-1)
        if self._seen is not None:
            self._seen |= {(call, row): output[0, :, at].clone() for at, row in enumerate(self._rows)}
        return output


def state_of(wrong: WrongOperation) -> Recurrence | None:
    """Return the mixer behind an operation whose rows take something from earlier ones; None if there is none."""
    recurrence = recurrence_of(wrong)
    return recurrence if recurrence is not None and _has_state(recurrence) else None


def wrong_state(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The scan, or the convolution before it, begins elsewhere, or its state is kept in another format.

    Causes: the state, or the convolution's or the recurrence's alone, is not carried from one step to the next, from
    prefill into decode, or from row to row; it is not updated in decode, or a step late; it is kept in *dtype* from one
    step to the next; it takes in a row twice; it begins with what request *n* left.
    """
    recurrence = state_of(wrong)
    if recurrence is None:
        return
    for hypothesis in chain(_begun_elsewhere(recurrence), _kept_coarsely(recurrence)):
        yield hypothesis
        if wrong.edit_budget is not None and wrong.edit_budget.is_half_spent:
            return


def _has_state(recurrence: Recurrence) -> bool:
    """Whether wrong rows take anything from earlier rows of their request: experts do not.

    Each history begins again at one of its wrong rows, since a state may reach no further than the next row. True where
    only first rows are wrong: of these it cannot be told.
    """
    wrong, parts = set(recurrence.wrong.rows.places()), []
    for rows in recurrence.histories:
        later = next((at for at, place in enumerate(rows.places()) if at and place in wrong), len(rows))
        parts += [rows.select(part) for part in torch.arange(len(rows)).split([later, len(rows) - later]) if len(part)]
    return len(parts) == len(recurrence.histories) or not recurrence.wrong.is_expected(recurrence.run(parts))


def _begun_elsewhere(recurrence: Recurrence) -> Iterator[Hypothesis]:
    """The state is not carried on, or not kept up to date, or it is what another request left."""
    patterns: dict[str, Callable[[Rows], list[Rows]]] = {
        "{state} is not carried from one step to the next": by_step,
        "{state} of the prefill is not carried into decode": _prefill_and_decode,
        "{state} is not updated in decode: every row goes on from the end of the first step": _frozen,
        "{state} is a step late: the rows of the step before are not in it": _a_step_late,
        "{state} takes in the last row of the step before twice": _doubled,
    }
    if _any_within_a_step(recurrence.wrong.rows):  # or there would be no difference to steps
        patterns["no {state} is carried from row to row"] = _row_by_row
    shortest = recurrence.of_shortest()
    right, right_of_shortest = recurrence.convolved(), shortest.convolved()
    for cause, pattern in patterns.items():
        some, every = ([item for rows in of.histories for item in pattern(rows)] for of in (shortest, recurrence))
        is_told = recurrence.wrong.can_be_fitted
        if not is_told or any(map(shortest.is_near, _of_sequences(shortest, some, cause, right_of_shortest))):
            yield from _of_sequences(recurrence, every, cause, right)
    for request in recurrence.wrong.recording.manifest.requests:
        yield from _left_by(recurrence, request, right)


def _kept_coarsely(recurrence: Recurrence) -> Iterator[Hypothesis]:
    """The state, or a part of it, is rounded to a 16-bit dtype after each step."""
    with suppress(AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        right = recurrence.run_by_steps(lambda _name, state: state)
        if not recurrence.wrong.is_expected(right):
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
    left = history(recurrence.wrong, request.id, len(request.token_ids) - 1)
    if others and bool((left.step >= 0).all()):
        joined = [Rows.concat([left, rows]) for rows in others]
        sequences = [rows for rows in recurrence.histories if int(rows.request[0]) == request.id]
        cause = f"{{state}} begins with what request {request.id} left, instead of with zero"
        yield from _of_sequences(recurrence, [*sequences, *joined], cause, right)


def _of_sequences(recurrence: Recurrence, sequences: list[Rows], cause: str, right: Convolved) -> Iterator[Hypothesis]:
    """All of the state is of other rows, or that of the convolution alone, or all but that.

    Args:
        recurrence: of the layer.
        sequences: of rows that follow each other, as far as the wrong state goes.
        cause: with a place for what state it is.
        right: what the convolutions should give.
    """
    wrong: Convolved = {}
    output_of = {"the state": recurrence.run(sequences, seen=wrong)}
    if right.keys() <= wrong.keys() and right:
        output_of["the convolution's state"] = recurrence.run(convolved=wrong)
        output_of["the recurrence's state"] = recurrence.run(sequences, convolved=right)
    expected, told = recurrence.wrong.expected, list[torch.Tensor]()
    for state, output in reversed(output_of.items()):
        if output is not None and not any(torch.equal(output, item) for item in (expected, *told)):
            told.append(output)
            yield Hypothesis(cause=cause.format(state=state).replace("no the ", "no "), output=output)


def by_step(rows: Rows) -> list[Rows]:
    """Cut the rows of a request where another step begins."""
    return [_pick(rows, list(group)) for _, group in groupby(range(len(rows)), key=lambda at: int(rows.step[at]))]


def _prefill_and_decode(rows: Rows) -> list[Rows]:
    """Cut a request's rows where its steps begin to have one row only."""
    pieces = by_step(rows)
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
    first, *later = by_step(rows)
    return [first, *(Rows.concat([first, _pick(step, [at])]) for step in later for at in range(len(step)))]


def _a_step_late(rows: Rows) -> list[Rows]:
    """The rows of a step after those of all steps but the one before."""
    steps = by_step(rows)
    return [Rows.concat([*steps[: max(at - 1, 0)], step]) for at, step in enumerate(steps)]


def _doubled(rows: Rows) -> list[Rows]:
    """The rows of a step after those of the steps before, the last of which is there twice."""
    steps = by_step(rows)
    pieces = [steps[0]]
    for before, step in pairwise(steps):
        pieces.append(Rows.concat([pieces[-1], _pick(before, [len(before) - 1]), step]))
    return pieces


def _pick(rows: Rows, places: list[int]) -> Rows:
    return rows.select(torch.tensor(places))
