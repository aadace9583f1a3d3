"""Judges the rows of every operation against its bound, and sums them up."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from harness.compare.align import Rows
from harness.compare.bounds import CONTROL_FACTOR, THROUGH_FACTOR, Sensitivity, control_bound, derived_bound
from harness.compare.choices import choice_errors
from harness.compare.conventions import Convention, conventions
from harness.compare.evidence import MAX_LAYERS, MAX_ROWS, Evidence, histories, merged, spread
from harness.compare.granularity import ways
from harness.compare.replay import TapRows
from harness.compare.systematic import Effects, beyond_control
from harness.metrics import rounding_unit, row_errors
from harness.oracle.attention import attention_sensitivity
from harness.oracle.model import HFModel
from harness.results import Effect
from harness.taps import KINDS, ErrorModel, Kind
from harness.workers import Workers

_HALF = (torch.bfloat16, torch.float16)
_BLOCK_ELEMENTS = 1 << 18
"""Elements of a weight that are squared at a time: they stay in the second-level cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalErrors:
    """Local errors of one operation; tensors [rows] in the order of `rows`."""

    rows: Rows
    roundings: torch.Tensor
    """float64; infinite where the engine's row is not finite though it should be, NaN where it cannot be judged because
    what it was given is not finite."""
    bound: torch.Tensor
    """float64: the largest error that rounding explains."""
    bad: torch.Tensor
    """bool: out of bounds."""
    exact: bool
    control: torch.Tensor | None = None
    """float64: what HF's own module loses in the engine's dtype on the same inputs; None where it was not run."""
    is_bounded_by_control: bool = False
    convention: str | None = None
    effect: Effect | None = None
    """A direction that the errors have over all rows, and that neither truth nor control has."""
    through: tuple[str, ...] = ()
    """Taps that were not recorded and were computed on the way; empty where the operation was judged by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJudgement:
    """What forced replay found."""

    errors: Mapping[str, LocalErrors]
    """By tap, in the order of the run."""
    evidence: Mapping[str, Evidence]
    """Of taps with wrong rows."""


@dataclass(slots=True)
class _Parts:
    """Results of one operation, batch by batch."""

    rows: list[Rows] = field(default_factory=list)
    roundings: list[torch.Tensor] = field(default_factory=list)
    bound: list[torch.Tensor] = field(default_factory=list)
    control: list[torch.Tensor] = field(default_factory=list)
    is_bounded_by_control: bool = False
    convention: str | None = None
    effects: Effects | None = None
    control_effects: Effects | None = None
    evidence: list[Evidence] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Rows of one operation that were measured, and are still to be taken into its results."""

    rows: TapRows
    through: tuple[str, ...]
    roundings: torch.Tensor
    control: torch.Tensor | None
    bound: torch.Tensor
    by_control: bool


class LocalJudge:
    """Judges the rows of every operation and sums them up.

    Operations are measured by the workers, several at a time; what was measured is taken in the order of the run.
    """

    def __init__(
        self,
        hf: HFModel,
        dtype: torch.dtype,
        usable: set[str],
        *,
        is_alone: bool,
        workers: Workers[Measured] | None = None,
    ) -> None:
        self.hf, self.graph, self.usable = hf, hf.graph, usable
        self.ways = ways(hf.graph, usable)
        self.heads = hf.graph.head
        self._dtype, self._unit = dtype, rounding_unit(dtype)
        self._is_alone = is_alone
        self._workers = Workers[Measured]() if workers is None else workers
        self._parts: dict[str, _Parts] = {}
        self._column_norms: dict[str, torch.Tensor] = {}
        self._num_kept = Counter[str]()

    def add(self, rows: TapRows, through: tuple[str, ...]) -> None:
        """See `Judge.add`."""
        part = self._parts.setdefault(rows.operation.tap, _Parts())
        if rows.operation.kind is Kind.CHOICE:
            errors = choice_errors(rows)
            part.rows.append(rows.rows)
            part.roundings.append(errors)
            part.bound.append(torch.ones_like(errors))
            return
        self._workers.submit(partial(self._measure, rows, through, part))

    def settle(self) -> None:
        """See `Judge.settle`."""
        for measured in self._workers.finished():
            self._take(measured, self._parts[measured.rows.operation.tap])

    def _measure(self, rows: TapRows, through: tuple[str, ...], part: _Parts) -> Measured:
        """Measure some rows: their errors, their bounds, and what direction the errors have."""
        roundings, control = self._roundings(rows.actual, rows.expected), None
        if rows.control is not None:
            control = self._roundings(rows.control, rows.expected)
        bound, by_control = self._bound(rows, roundings, control, through)
        self._add_effects(rows, part, roundings, control)
        return Measured(
            rows=rows, through=through, roundings=roundings, control=control, bound=bound, by_control=by_control
        )

    def _take(self, measured: Measured, part: _Parts) -> None:
        """Take what was measured; rows that are out of bounds are held against the conventions first."""
        rows, roundings, bound = measured.rows, measured.roundings, measured.bound
        if not measured.through and bool((roundings > bound).any()):
            roundings, bound, part.convention = self._best_convention(rows, roundings, bound, part.convention)
        part.rows.append(rows.rows)
        part.roundings.append(roundings)
        part.bound.append(bound)
        part.is_bounded_by_control |= measured.by_control
        if measured.control is not None:
            part.control.append(measured.control)
        bad = roundings > bound
        if bool(bad.any()) and not measured.through:
            self._keep_evidence(rows, part, bad, roundings, bound)

    def _roundings(self, actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """[rows] float64: errors in roundings; infinite where only the actual row is not finite, NaN where both."""
        error = row_errors(actual.to(expected.device), expected).cpu() / self._unit
        odd = ~error.isfinite()  # only such rows can hold anything that is not finite
        if bool(odd.any()):
            at = odd.to(actual.device)
            error[odd] = torch.where(actual[at].isfinite().all(dim=1).cpu(), error[odd], torch.inf)
            is_given = expected[odd.to(expected.device)].isfinite().all(dim=1).cpu()
            error[odd] = torch.where(is_given, error[odd], torch.nan)
        return error

    def _bound(
        self, rows: TapRows, roundings: torch.Tensor, control: torch.Tensor | None, through: tuple[str, ...]
    ) -> tuple[torch.Tensor, bool]:
        """Return the bound of each row, and whether the control made it."""
        model = KINDS[rows.operation.kind].error_model
        if through or model is None:
            factor = THROUGH_FACTOR if through else CONTROL_FACTOR
            known = roundings.new_zeros(len(roundings)) if control is None else control
            return control_bound(known, self._dtype, factor=factor, model=model), True
        bound = self._derived_bound(model, rows, roundings)
        if control is None or not bool((control > bound).any()):
            return bound, False
        # HF's own module rounds more than the model of its kind says: the model does not hold for this module.
        return torch.maximum(bound, control_bound(control, self._dtype, factor=CONTROL_FACTOR, model=model)), True

    def _derived_bound(self, model: ErrorModel, rows: TapRows, roundings: torch.Tensor) -> torch.Tensor:
        if rows.operation.kind is Kind.LINEAR and self._dtype in _HALF:
            # The accumulator's share is 1e-5 of a rounding times the amplification: looked at where it may decide.
            bound = derived_bound(model, self._dtype, Sensitivity(), rows.expected)
            if not bool((roundings > bound).any()):
                return bound
        return derived_bound(model, self._dtype, self._sensitivity(rows), rows.expected)

    def _sensitivity(self, rows: TapRows) -> Sensitivity:
        if rows.operation.kind is Kind.ATTENTION and rows.value.call is not None:
            return self._attention_sensitivity(rows)
        if rows.operation.kind is Kind.LINEAR:
            return self._linear_sensitivity(rows)
        return Sensitivity()

    def _attention_sensitivity(self, rows: TapRows) -> Sensitivity:
        assert rows.value.call is not None
        found = attention_sensitivity(rows.value.call)
        at = rows.places.to(found.amplification.device)
        both = found.amplification, found.score_sensitivity
        amplification, scores = (x.flatten()[at].to("cpu", torch.float64) for x in both)
        return Sensitivity(amplification=amplification, score_sensitivity=scores)

    def _linear_sensitivity(self, rows: TapRows) -> Sensitivity:
        weight = getattr(self.hf.module(rows.operation.module), "weight", None)
        (x,) = (each.flatten(1) for each in rows.inputs())
        if not isinstance(weight, torch.Tensor) or x.shape[1] not in weight.shape:
            return Sensitivity()
        norms = self._column_norms.get(rows.operation.tap)
        if norms is None:
            norms = self._column_norms[rows.operation.tap] = _column_norms2(weight, x.shape[1])
        scale = (x.square() @ norms.to(x.device, x.dtype)).sqrt()
        norm = torch.linalg.vector_norm(rows.expected, dim=1)
        return Sensitivity(amplification=(scale / norm).to("cpu", torch.float64))

    def _best_convention(
        self, rows: TapRows, roundings: torch.Tensor, bound: torch.Tensor, known: str | None
    ) -> tuple[torch.Tensor, torch.Tensor, str | None]:
        """Hold rows that fail against the conventions that apply, and keep the best fit."""
        best = (int((roundings > bound).sum()), roundings, bound, known)
        inputs = [] if rows.operation.kind is Kind.ATTENTION else rows.inputs()
        for convention in self._conventions(rows, inputs):
            expected = convention.expected().to(rows.expected.device)
            errors = self._roundings(rows.actual, expected)
            errors = torch.where(roundings.isnan(), torch.nan, errors)
            room = derived_bound(convention.model, self._dtype, self._sensitivity(rows), expected)
            if int((errors > room).sum()) < best[0]:
                best = (int((errors > room).sum()), errors, room, convention.name)
        return best[1:]

    def _conventions(self, rows: TapRows, inputs: list[torch.Tensor]) -> Iterator[Convention]:
        return conventions(
            self.hf,
            rows.operation,
            dtype=self._dtype,
            rows=rows.places.to(rows.expected.device),
            inputs=inputs,
            call=rows.value.call,
        )

    def _add_effects(self, rows: TapRows, part: _Parts, roundings: torch.Tensor, control: torch.Tensor | None) -> None:
        """Add the rows to what is tested for a direction; the control's only where it will be asked for."""
        if part.effects is None:
            part.effects, part.control_effects = (self._new_effects(rows) for _ in range(2))
        assert part.control_effects is not None
        judged, position = roundings.isfinite(), rows.places % rows.batch.num_tokens
        part.effects.add(position, rows.actual, rows.expected, judged)
        if rows.control is None or control is None:
            return
        if not self._is_alone or part.effects.strongest() is not None:
            part.control_effects.add(position, rows.control, rows.expected, judged & control.isfinite())

    def _new_effects(self, rows: TapRows) -> Effects:
        shape = rows.value.rows.shape
        return Effects(rows.operation.kind, self._dtype, num_heads=shape[1] if len(shape) == 3 else 1)

    def _keep_evidence(
        self, rows: TapRows, part: _Parts, bad: torch.Tensor, roundings: torch.Tensor, bound: torch.Tensor
    ) -> None:
        operation = rows.operation
        if not part.evidence and self._num_kept[operation.site] == MAX_LAYERS:
            return
        self._num_kept[operation.site] += not part.evidence
        if operation.kind is Kind.ATTENTION and rows.value.call is not None:
            found, kept = histories(rows.batch, rows.value.call, rows.places[bad])
            where = {place: at for at, place in enumerate(rows.places.tolist())}
            chosen = torch.tensor([where[place] for place in kept.tolist()])
            inputs = list[torch.Tensor]()
        else:
            wrong = bad.nonzero()[:, 0]
            found, chosen = (), wrong[torch.tensor(spread(range(len(wrong)), MAX_ROWS))]
            inputs = rows.inputs(rows.places[chosen])
        part.evidence.append(
            Evidence(
                operation=operation,
                rows=rows.batch.rows(rows.places[chosen]),
                expected=rows.expected[chosen.to(rows.expected.device)].to("cpu", torch.float64),
                inputs=[_kept_input(x) for x in inputs],
                roundings=roundings[chosen],
                bound=bound[chosen],
                histories=found,
            )
        )

    def judgement(self) -> LocalJudgement:
        """Sum up what was judged, in the order of the run."""
        in_order = [op.tap for op in self.graph if op.tap in self._parts]
        return LocalJudgement(
            errors={tap: self._errors(tap, self._parts[tap]) for tap in in_order},
            evidence={tap: merged(self._parts[tap].evidence) for tap in in_order if self._parts[tap].evidence},
        )

    def _errors(self, tap: str, part: _Parts) -> LocalErrors:
        roundings, bound = torch.cat(part.roundings), torch.cat(part.bound)
        return LocalErrors(
            rows=Rows.concat(part.rows),
            roundings=roundings,
            bound=bound,
            bad=roundings > bound,
            exact=bool((roundings == 0).all()),
            control=torch.cat(part.control) if len(part.control) == len(part.roundings) else None,
            is_bounded_by_control=part.is_bounded_by_control,
            convention=part.convention,
            effect=beyond_control(part.effects, part.control_effects),
            through=self.ways.get(tap) or (),
        )


def _kept_input(x: torch.Tensor) -> torch.Tensor:
    return x.to("cpu", torch.float64).flatten(1) if x.is_floating_point() else x.cpu()


def _column_norms2(weight: torch.Tensor, num_in: int) -> torch.Tensor:
    """Return the squared norm of what each input is multiplied with: [in] float64."""
    if weight.shape[1] != num_in:  # HF's Conv1D keeps its weight as [in, out]
        weight = weight.T
    norms = torch.zeros(num_in, dtype=torch.float64, device=weight.device)
    for rows in weight.split(max(1, _BLOCK_ELEMENTS // num_in)):
        finer = rows if rows.dtype == torch.float64 else rows.to(torch.float32)
        norms += finer.square().sum(dim=0)
    return norms
