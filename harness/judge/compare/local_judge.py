"""Judges the rows of every operation against its bound, and sums them up."""

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from harness.base.numerics import Numerics
from harness.base.workers import Workers
from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.compare.choices import choice_errors
from harness.judge.compare.evidence import MAX_LAYERS, MAX_ROWS, Evidence, PartInputs, histories, merged
from harness.judge.compare.granularity import unrecorded_before
from harness.judge.compare.replay import Judge, TapRows
from harness.judge.compare.row_judge import RowErrors, RowJudge, judged_queries
from harness.judge.compare.row_sample import SampledRows, spread
from harness.judge.compare.systematic import Effects, beyond_control
from harness.oracle.attention import score_slope
from harness.oracle.model import HFModel
from harness.results.check import Effect


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
    dtype: torch.dtype | None = None
    """The unit: what the operation's tensors are rounded to; None if nothing was measured in roundings."""
    control: torch.Tensor | None = None
    """float64: what HF's own module loses in the engine's dtype on the same inputs; None if it was not run."""
    is_bounded_by_control: bool = False
    convention: str | None = None
    effect: Effect | None = None
    """A direction that the errors have over all rows, and that neither truth nor control has."""
    unrecorded: tuple[str, ...] = ()
    """Taps that HF computed because they were not recorded; empty if the operation was judged by itself."""
    failures: tuple[str, ...] = ()
    """Conventions that raised, so that the operation was not held to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJudgement:
    """The result of forced replay."""

    errors: Mapping[str, LocalErrors]
    """By tap, in the order of the run."""
    evidence: Mapping[str, Evidence]
    """Of taps with wrong rows."""
    is_partial: bool = False
    """Whether the model was left at the first part with a wrong operation: what lies after it was not judged."""
    sampled: SampledRows = field(default_factory=SampledRows)


@dataclass(slots=True)
class _TapTotals:
    """What has been judged of one operation so far; the lists have an entry for each batch."""

    dtype: torch.dtype | None = None
    rows: list[Rows] = field(default_factory=list)
    roundings: list[torch.Tensor] = field(default_factory=list)
    bound: list[torch.Tensor] = field(default_factory=list)
    control: list[torch.Tensor] = field(default_factory=list)
    is_bounded_by_control: bool = False
    convention: str | None = None
    allowance: float = 0.0
    """See `RowErrors.allowance`."""
    effects: Effects | None = None
    control_effects: Effects | None = None
    evidence: list[Evidence] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Rows of one operation that were measured, and are still to be taken into its results."""

    rows: TapRows
    errors: RowErrors
    has_direction: bool
    """Whether the errors of the operation, as far as it was measured, have a direction that rounding has not."""


class LocalJudge(Judge):
    """Judges the rows of every operation and sums them up.

    `add` and `settle` run on the thread of the truth. `add` leaves the measuring (`_measure`) to the workers, while the
    model goes on; `settle` takes what they measured into the totals (`_take`), in the order of the run. A worker
    changes nothing but the effects of its operation, whose batches are measured one after the other.
    """

    def __init__(
        self,
        hf: HFModel,
        dtype: torch.dtype,
        usable: set[str],
        *,
        is_alone: bool,
        declared: Numerics | None = None,
        may_truncate: bool = False,
        stops_early: bool = False,
        workers: Workers[Measured] | None = None,
    ) -> None:
        super().__init__(hf.graph, usable)
        self.unrecorded_before = unrecorded_before(hf.graph, usable)
        self._rows = RowJudge(hf, dtype, usable, declared or Numerics())
        self._is_alone, self._may_truncate = is_alone, may_truncate
        self._workers = Workers[Measured]() if workers is None else workers
        self._totals: dict[str, _TapTotals] = {}
        self._num_kept = Counter[str]()
        self._stops_early, self._has_bad = stops_early, False

    def add(self, rows: TapRows) -> None:
        """See `Judge.add`."""
        totals = self._totals.setdefault(rows.operation.tap, _TapTotals())
        if rows.operation.kind is Kind.CHOICE:
            distances = choice_errors(rows)
            bound = torch.ones_like(distances)
            errors = RowErrors(dtype=torch.float32, roundings=distances, bound=bound, expected=rows.expected)
            totals.rows.append(rows.rows)
            totals.roundings.append(distances)
            totals.bound.append(bound)
            if errors.num_bad:
                self._keep_evidence(rows, totals, errors, errors.bad)
            return
        self._workers.submit(partial(self._measure, rows, totals))

    def settle(self) -> None:
        """See `Judge.settle`."""
        for measured in self._workers.finished():
            self._take(measured, self._totals[measured.rows.operation.tap])

    @property
    def is_decided(self) -> bool:
        """See `Judge.is_decided`: where it stops early, whether an operation that was judged by itself is wrong."""
        return self._stops_early and self._has_bad

    def _measure(self, rows: TapRows, totals: _TapTotals) -> Measured:
        """Measure some rows: their errors, their bounds, and what direction the errors have."""
        errors = self._rows.judge(rows, dtype=totals.dtype)
        if totals.effects is None:
            totals.effects, totals.control_effects = (self._new_effects(rows, errors.dtype) for _ in range(2))
        before = None if self._is_alone else copy.deepcopy(totals.effects)
        self._add_effects(rows, totals, errors)
        has_direction = not rows.unrecorded and self._has_direction(totals, errors)
        if has_direction and errors.convention is None:
            totals.effects, errors = self._without_direction(rows, totals.effects, before, errors)
            has_direction = errors.convention is None
        return Measured(rows=rows, errors=errors, has_direction=has_direction)

    @staticmethod
    def _has_direction(totals: _TapTotals, errors: RowErrors) -> bool:
        allowance = max(totals.allowance, errors.allowance)
        return beyond_control(totals.effects, totals.control_effects, allowance=allowance) is not None

    def _take(self, measured: Measured, totals: _TapTotals) -> None:
        """Take what was measured."""
        rows, errors = measured.rows, measured.errors
        totals.dtype = errors.dtype
        totals.rows.append(rows.rows)
        totals.roundings.append(errors.roundings)
        totals.bound.append(errors.bound)
        totals.is_bounded_by_control |= errors.is_bounded_by_control
        totals.convention = errors.convention or totals.convention
        totals.allowance = max(totals.allowance, errors.allowance)
        if errors.control is not None:
            totals.control.append(errors.control)
        if rows.unrecorded and not self._is_within_part(rows):
            return  # what would have to be run again for a cause reaches over several parts of the model
        if bool(errors.bad.any()):
            self._has_bad |= not rows.unrecorded
            self._keep_evidence(rows, totals, errors, errors.bad)
        elif measured.has_direction:  # of which any row is as good as another
            self._keep_evidence(rows, totals, errors, errors.roundings.isfinite())

    def _is_within_part(self, rows: TapRows) -> bool:
        """Whether the unrecorded taps before the operation all stand in its part of the model."""
        if rows.part is None:
            return False
        part = f"{rows.part.path}."
        return all(f"{self.graph[tap].module}.".startswith(part) for tap in rows.unrecorded)

    def _new_effects(self, rows: TapRows, dtype: torch.dtype) -> Effects:
        shape = rows.value.rows.shape
        num_heads = shape[1] if len(shape) == 3 else 1
        return Effects(rows.operation.kind, dtype, num_heads=num_heads, may_truncate=self._may_truncate)

    def _add_effects(self, rows: TapRows, totals: _TapTotals, errors: RowErrors) -> None:
        """Add the rows to what is tested for a direction; the control's only where it will be asked for."""
        assert totals.effects is not None
        assert totals.control_effects is not None
        slope = _slope(rows, errors)
        judged = _add(totals.effects, rows, errors, slope)
        if rows.control is None or errors.control is None:
            return
        if not self._is_alone or totals.effects.strongest() is not None:
            position = rows.places % rows.batch.num_tokens
            finite = judged & errors.control.isfinite()
            totals.control_effects.add(position, rows.control, rows.expected, finite, slope)

    def _without_direction(
        self, rows: TapRows, effects: Effects, before: Effects | None, errors: RowErrors
    ) -> tuple[Effects, RowErrors]:
        """Return effects and errors under a convention that the direction of the errors comes of; else as they are."""
        best = self._rows.under_best_convention(rows, errors)
        if best is None or best.num_bad > errors.num_bad or best.typical >= errors.typical:
            return effects, errors
        others = before or self._new_effects(rows, errors.dtype)
        _add(others, rows, best, _slope(rows, best))
        return (effects, errors) if beyond_control(others, None, allowance=best.allowance) else (others, best)

    def _keep_evidence(self, rows: TapRows, totals: _TapTotals, errors: RowErrors, bad: torch.Tensor) -> None:
        """Keep wrong rows; of choices, with the scores that they were to be made by in the place of their inputs."""
        operation, is_choice = rows.operation, rows.operation.kind is Kind.CHOICE
        if not self._is_kept(operation, totals):
            return
        if operation.kind is Kind.ATTENTION and rows.value.call is not None:
            found, kept = histories(rows.batch, rows.value.call, rows.places[bad])
            where = {place: at for at, place in enumerate(rows.places.tolist())}
            chosen = torch.tensor([where[place] for place in kept.tolist()])
            inputs = list[torch.Tensor]()
        else:
            wrong = bad.nonzero()[:, 0]
            found, chosen = (), wrong[torch.tensor(spread(range(len(wrong)), MAX_ROWS))]
            inputs = [_scores(rows, rows.places[chosen])] if is_choice else rows.inputs(rows.places[chosen])
        totals.evidence.append(
            Evidence(
                operation=operation,
                rows=rows.batch.rows(rows.places[chosen]),
                expected=rows.expected[chosen.to(rows.expected.device)].to("cpu", torch.float64).flatten(1),
                inputs=[_kept_input(x) for x in inputs],
                roundings=errors.roundings[chosen],
                bound=errors.bound[chosen],
                dtype=errors.dtype,
                histories=found,
                unrecorded=() if is_choice else rows.unrecorded,
                part_inputs=None if is_choice or rows.part is None else PartInputs(batch=rows.batch, call=rows.part),
            )
        )

    def _is_kept(self, operation: Operation, totals: _TapTotals) -> bool:
        """Whether evidence of an operation is kept still: of a site, that of the first layers."""
        if not totals.evidence and self._num_kept[operation.site] == MAX_LAYERS:
            return False
        self._num_kept[operation.site] += not totals.evidence
        return True

    def judgement(self) -> LocalJudgement:
        """Sum up what was judged, in the order of the run."""
        in_order = [op.tap for op in self.graph if op.tap in self._totals]
        return LocalJudgement(
            errors={tap: self._errors(tap, self._totals[tap]) for tap in in_order},
            evidence={tap: merged(self._totals[tap].evidence) for tap in in_order if self._totals[tap].evidence},
            is_partial=self.is_decided,
        )

    def _errors(self, tap: str, totals: _TapTotals) -> LocalErrors:
        roundings, bound = torch.cat(totals.roundings), torch.cat(totals.bound)
        return LocalErrors(
            rows=Rows.concat(totals.rows),
            roundings=roundings,
            bound=bound,
            bad=roundings > bound,
            exact=bool((roundings == 0).all()),
            dtype=totals.dtype,
            control=torch.cat(totals.control) if len(totals.control) == len(totals.roundings) else None,
            is_bounded_by_control=totals.is_bounded_by_control,
            convention=totals.convention,
            effect=beyond_control(totals.effects, totals.control_effects, allowance=totals.allowance),
            unrecorded=self.unrecorded_before.get(tap) or (),
            failures=tuple(self._rows.failures.get(tap, ())),
        )


def _add(effects: Effects, rows: TapRows, errors: RowErrors, slope: torch.Tensor | None) -> torch.Tensor:
    """Add the rows that can be judged; return which these are, [R] bool."""
    judged = errors.roundings.isfinite()
    effects.add(rows.places % rows.batch.num_tokens, rows.actual, errors.expected, judged, slope)
    return judged


def _slope(rows: TapRows, errors: RowErrors) -> torch.Tensor | None:
    """[R, W] how the rows move with the softmax scale; None where a row shows that by itself, or there is none."""
    if rows.value.call is None or errors.dtype not in (torch.bfloat16, torch.float16) or errors.num_bad:
        return None
    call, at = judged_queries(rows)
    slope = score_slope(call).flatten(0, 1)
    return slope[at.to(slope.device)]


def _scores(rows: TapRows, places: torch.Tensor) -> torch.Tensor:
    """Return the truth's scores at some places of the batch, [places, ...]."""
    assert rows.value.scores is not None
    return rows.value.scores[places.to(rows.value.scores.device)]


def _kept_input(x: torch.Tensor) -> torch.Tensor:
    return x.to("cpu", torch.float64).flatten(1) if x.is_floating_point() else x.cpu()
