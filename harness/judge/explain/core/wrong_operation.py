"""The wrong rows of one operation with what was recorded around them, and a hypothesis about them.

An explanation is a function from the first to several of the second.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import nn

from harness.base.metrics import rounding_unit
from harness.formats.recording import Recording, Step
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.align import Locator, Rows, step_rows
from harness.judge.compare.evidence import AttentionContext, Evidence
from harness.judge.compare.sequences import SlotHistory
from harness.judge.compare.states import StateRuns
from harness.judge.explain.core.rerun import Budget, Rerun, replay
from harness.oracle.model import HFModel
from harness.oracle.rotation import Rotation, rotations
from harness.results.check import Provenance

_MAX_WEIGHT_ELEMENTS = 1 << 27
FALL = 0.5
"""What the error of a row must fall to under a mistake that explains it, as a share of it."""
ALLOWANCE = 2.0
"""Times a row's bound that may be left, and roundings where it has none: a factor may be rounded, too."""
_SAME = 1e-5
"""Relative distance within which an operation that is computed by itself is the one in HF's forward."""


KEY, VALUE = "key", "value"
KeptRows = Mapping[str, tuple[Rows, torch.Tensor]]
"""Rows [M, K*H] of keys and of values, by the two names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A mistake in place of the operation, and the values that it would have given."""

    cause: str
    """The mistake, in the words of the report: `rotary over neighbouring pairs`."""
    output: torch.Tensor
    """[rows, width] float64, what the wrong rows would be."""
    detail: str = ""
    """Further facts under it: a fitted value, a list of rows."""
    num_fitted: int = 0
    """Numbers that were fitted, over all rows together: each costs likelihood, and needs rows that support it."""
    allowance: float = ALLOWANCE
    """Times a row's own bound that its error may still be under it: under a cause other roundings may be made than in
    the right operation. What only describes an error, by an average over the rows for one, leaves what it does not
    describe, and has room for rounding alone."""
    is_cause: bool = True
    """Whether it may be asserted; False for what only says what was seen: a scale or a place that fits each row by
    itself, content that nothing recorded has."""
    is_vague: bool = False
    """Whether it only points elsewhere: what fits as well and says more comes first."""
    is_fallback: bool = False
    """Whether it says where and not what: it is asserted where no other cause fits."""
    decisive: torch.Tensor | None = None
    """[rows] bool: rows that it must explain, and half of all; None for all. A wrong state leaves later ones wrong."""
    unknown: torch.Tensor | None = None
    """[rows] bool: rows that would have read memory nobody wrote, so that `output` cannot be known there."""
    tap: str | None = None
    """Operation that it is about, if that was not recorded and another one shows it."""
    provenance: Callable[[], Provenance | None] | None = None
    """Traces one wrong place of the KV cache, where the cause lies in one."""


def hypotheses(outputs: Mapping[str, torch.Tensor]) -> Iterator[Hypothesis]:
    """Yield a hypothesis for each cause with what it gives, [rows, width] float64, and nothing fitted."""
    for cause, output in outputs.items():
        yield Hypothesis(cause=cause, output=output)


@dataclass(frozen=True, kw_only=True)
class Downstream:
    """What was recorded after an operation that was not."""

    tap: str
    """Of the operation."""
    actual: torch.Tensor
    """[R, V] float64, as recorded."""
    push: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """From rows of the operation [n, W] and their numbers [n] to what follows from them there, [n, V]."""

    def pushed(self, hypothesis: Hypothesis) -> Hypothesis:
        """Return what a hypothesis about the operation gives after it."""
        output = self.push(hypothesis.output, torch.arange(len(hypothesis.output)))
        return dataclass_replace(hypothesis, output=output, tap=hypothesis.tap or self.tap)


@dataclass(frozen=True, kw_only=True)
class WrongOperation(Evidence):
    """Some rows of one operation that is wrong, with what was recorded around them; explanations only read it.

    `R` rows, `W` elements of a row.
    """

    hf: HFModel
    """With the operation's part of it held in float64."""
    recording: Recording
    locator: Locator
    actual: torch.Tensor
    """[R, W] float64, as recorded; not finite where the engine's rows are not."""
    slot_history: SlotHistory
    """Who wrote what into the KV cache."""
    states: StateRuns | None = None
    """Runs the truth over any recorded rows, for the states that they leave."""
    sound: frozenset[str] = frozenset()
    """Taps of the recording that passed."""
    rerun: Rerun | None = None
    """The part of the model with the operation, to run it again with something else in it."""
    edit_budget: Budget | None = None
    """Time that is left for trying edits of HF's code; None: none are tried."""
    downstream: Downstream | None = None
    """For an operation that was not recorded: then `actual` is no more than a guess."""
    kept_rows: KeptRows | None = None
    """Keys and values of the rows around it, of an attention that HF's interface does not show."""

    def misfit(self, rows: torch.Tensor, output: torch.Tensor) -> float:
        """Return how far rows with these numbers [n] are from what was recorded, were they `output` [n, W]."""
        if self.downstream is None:
            return float((output - self.actual[rows]).norm())
        return float((self.downstream.push(output, rows) - self.downstream.actual[rows]).norm())

    @property
    def can_be_fitted(self) -> bool:
        """Whether what was recorded says how the operation is wrong; not of what stands after it, nor of sound rows."""
        return self.actual is not self.expected

    @property
    def positions(self) -> torch.Tensor:
        """[R] int64: of rotary in a layer that predicts further tokens, those of the tokens that it looks ahead to."""
        return self.rows.position + self.operation.positions_ahead

    @property
    def token_ids(self) -> torch.Tensor:
        """[R] int64: the tokens that the rows were to be computed from."""
        return token_ids(self.recording, self.rows, self.operation.tokens_ahead)

    @property
    def are_single(self) -> bool:
        """Whether each wrong row is its request's only one in its step, as in decode."""
        steps = self.recording.steps
        return all(int((steps[step].request == request).sum()) == 1 for request, _, step in self.rows.identities())

    @cached_property
    def num_elements(self) -> float:
        """Elements of a row that carry the error: as many as would carry it evenly (its participation ratio)."""
        error = self.actual - self.expected
        energy = (
            (error / error.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)).square().sum(dim=0)
        )
        total = float(energy.sum())
        return total**2 / float(energy.square().sum()) if total else 1.0

    def factor_of(self, part: torch.Tensor, rest: torch.Tensor | float = 0.0) -> float:
        """Return the factor by which `part` [R, W], added to `rest`, comes nearest to what was recorded."""
        return float(((self.actual - rest) * part).sum() / part.square().sum())

    def select(self, keep: torch.Tensor) -> "WrongOperation":
        """Return the operation at the rows where the mask [R] holds."""
        views, begin = [], 0
        for view in self.views:
            of_view = keep[begin : begin + len(view.rows)]
            begin += len(view.rows)
            if bool(of_view.any()):
                views.append(view.select(of_view))
        return dataclass_replace(self.take(keep), views=tuple(views), downstream=None)

    def take(self, order: torch.Tensor) -> Self:
        """See `Evidence.take`."""
        return dataclass_replace(super().take(order), actual=self.actual[order])

    def over_views(self, attend: Callable[[AttentionContext], torch.Tensor]) -> torch.Tensor:
        """Return what `attend` gives of each view [T, N*H], over all views: [R, N*H]."""
        return torch.cat([attend(view) for view in self.views])

    def rows_of(self, view: AttentionContext) -> torch.Tensor:
        """Return the indices of a view's rows in all rows, [T] int64."""
        begin = 0
        for item in self.views:
            if item is view:
                return torch.arange(begin, begin + len(item.rows))
            begin += len(item.rows)
        raise ValueError("the view is not of this operation")

    def single_rows(self) -> Iterator[AttentionContext]:
        """Yield a view of each row by itself, in their order."""
        for view in self.views:
            yield from (view.select(torch.tensor([at])) for at in range(len(view.rows)))

    def tap(self, name: str) -> torch.Tensor | None:
        """Return another tap at the same rows, [R, ...] float64 flat; None unless all of them were recorded."""
        return gathered(self.locator, name, self.rows)

    @property
    def config(self) -> Any:
        """HF's configuration of the operation's layer."""
        return self.hf.config_of(self.operation.layer)

    @property
    def head_dim(self) -> int:
        """Size of an attention head of the operation's layer."""
        return self.hf.head_dim_of(self.operation.layer)

    @property
    def graph(self) -> Graph:
        """Operations of the model."""
        return self.hf.graph

    @property
    def module(self) -> Any:
        """HF's module that shows the operation; an empty one where none does."""
        return self.module_at(self.operation.module)

    def module_at(self, path: str) -> Any:
        """Return HF's module at a path; an empty one where there is none: logits that are scaled have no module."""
        try:
            return self.hf.module(path)
        except AttributeError:
            return nn.Module()

    @cached_property
    def can_replay(self) -> bool:
        """Whether the operation can be computed by itself: on its own inputs it gives what it should."""
        return self.is_expected(self._replayed(self.inputs, self.positions))

    def replay(self, inputs: Sequence[torch.Tensor], positions: torch.Tensor) -> torch.Tensor | None:
        """Return what the operation gives on other inputs or positions: [rows, W] float64; None if it cannot be."""
        return self._replayed(inputs, positions) if self.can_replay else None

    def _replayed(self, inputs: Sequence[torch.Tensor], positions: torch.Tensor) -> torch.Tensor | None:
        if self.operation.kind is Kind.ROTARY:
            return None if self.rotation is None else self.rotation.turn(inputs[0].flatten(1), positions)
        return replay(self.hf, self.operation, list(inputs))

    def is_expected(self, output: torch.Tensor | None) -> bool:
        """Whether some way to compute the operation gives what it should."""
        return output is not None and output.shape == self.expected.shape and bool(self._are_expected(output).all())

    def _are_expected(self, output: torch.Tensor) -> torch.Tensor:
        are_expected: torch.Tensor = (output - self.expected).norm(dim=1) <= _SAME * self.expected.norm(dim=1)
        return are_expected

    @cached_property
    def rotation(self) -> Rotation | None:
        """The rotation that takes the operation's input to what it should be; None if the model has no such."""
        return next((item for item in self._rotations() if self.is_expected(self._turned(item))), None)

    def rows_of_a_rotation(self) -> torch.Tensor:
        """Return [R] bool: the most rows that one rotation gives. Requests of another length may have another."""
        of_each = [self._are_expected(self._turned(rotation)) for rotation in self._rotations()]
        return max(of_each, key=lambda rows: int(rows.sum()), default=torch.zeros(len(self.rows), dtype=torch.bool))

    def _rotations(self) -> Iterator[Rotation]:
        is_same_size = self.operation.kind is Kind.ROTARY and self.inputs[0].shape[1] == self.expected.shape[1]
        if is_same_size and not self.expected.shape[1] % self.head_dim:
            yield from rotations(self.hf, self.head_dim)

    def _turned(self, by: Rotation) -> torch.Tensor:
        return by.turn(self.inputs[0], self.positions)

    def weight(self, tap: str, name: str = "weight", rows: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return a parameter of a tap's module in float64, a matrix as [out, in], or some of its rows.

        None if there is none, or it is too large to be held.
        """
        if tap not in self.graph:
            return None
        path = self.graph[tap].module
        with self.hf.weights.held(self.hf.part_of(path)):
            module = self.module_at(path)
            tensor = getattr(module, name, None)
            if isinstance(tensor, torch.Tensor) and rows is not None:
                tensor = tensor[rows.to(tensor.device)]
            if not isinstance(tensor, torch.Tensor) or tensor.numel() > _MAX_WEIGHT_ELEMENTS:
                return None
            is_turned = name == "weight" and type(module).__name__ == "Conv1D"  # HF's, with [in, out]
            return (tensor.T if is_turned else tensor).detach().to("cpu", torch.float64, copy=True)

    def siblings(self) -> list[Operation]:
        """Return the other operations of the same kind that read the same taps."""
        operation = self.operation
        return [
            op
            for op in self.graph
            if op.kind is operation.kind and op.inputs == operation.inputs and op.tap != operation.tap
        ]


def explained(
    wrong: WrongOperation, output: torch.Tensor, rows: torch.Tensor | None = None, *, allowance: float = ALLOWANCE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a mistake leaves of wrong rows, in roundings, and whether it explains them: [n] each.

    Args:
        wrong: the rows.
        output: [n, W] what the mistake gives.
        rows: [n] their numbers; None for all.
        allowance: times a row's bound that may be left.
    """
    at = torch.arange(len(wrong.actual)) if rows is None else rows
    error, bound, roundings = (wrong.actual[at] - output).norm(dim=1), wrong.bound[at], wrong.roundings[at]
    relative = torch.where(error == 0, 0.0, error / output.norm(dim=1))
    residual = (relative / rounding_unit(wrong.dtype)).nan_to_num(nan=torch.inf)
    most = (allowance * bound.clamp(min=1)).clamp(min=torch.where(bound > 0, 0.0, ALLOWANCE))
    return residual, (residual <= most) & (residual <= FALL * roundings)


def gathered(locator: Locator, tap: str, rows: Rows) -> torch.Tensor | None:
    """Return a tap at some rows, [rows, ...] float64 flat; None unless it was recorded at all of them.

    A row that was computed in several steps is taken from its own step where that has it, else from the last.
    """
    taken = latest(locator, tap, rows)
    elsewhere = () if taken is None else (locator.find(tap, rows)[:, 0] != rows.step).nonzero()[:, 0].tolist()
    if taken is None or not elsewhere:
        return taken
    taken = taken.clone()
    for at in elsewhere:
        step = locator.recording.steps[int(rows.step[at])]
        row = row_in_step(step, tap, int(rows.request[at]), int(rows.position[at]))
        if row is None:
            return None
        taken[at] = step.tap(tap)[row].to(torch.float64).flatten()
    return taken


def latest(locator: Locator, tap: str, rows: Rows) -> torch.Tensor | None:
    """Return a tap at some rows, each from the last step that has it, [rows, ...] float64 flat; None unless all are."""
    if tap not in locator.taps() or not len(rows):
        return None
    places = locator.find(tap, rows)
    return None if bool((places[:, 0] < 0).any()) else locator.gather(tap, places).to(torch.float64).flatten(1)


def row_in_step(step: Step, tap: str, request: int, position: int) -> int | None:
    """Return the row of a tap in a step that is of this request and position."""
    if not step.has(tap):
        return None
    rows = step_rows(step, tap)
    here = ((rows.request == request) & (rows.position == position)).nonzero()[:, 0]
    return int(here[-1]) if len(here) else None


def row_inputs(locator: Locator, operation: Operation, rows: Rows) -> list[torch.Tensor] | None:
    """Return the inputs of an operation at some rows; None if one was not recorded."""
    if operation.kind is Kind.EMBEDDING or not operation.inputs:
        return [token_ids(locator.recording, rows)]
    inputs = [gathered(locator, tap, rows) for tap in operation.inputs]
    complete = [x for x in inputs if x is not None]
    return complete if len(complete) == len(inputs) else None


def token_ids(recording: Recording, rows: Rows, ahead: int = 0) -> torch.Tensor:
    """Return the tokens that the rows were to be computed from, [rows] int64: so many after their own."""
    tokens = {request.id: request.token_ids for request in recording.manifest.requests}
    return torch.tensor([tokens[request][position + ahead] for request, position in rows.places()], dtype=torch.int64)


Explain = Callable[[WrongOperation], Iterable[Hypothesis]]
"""One explanation: yields what might have been done, likelier first."""
