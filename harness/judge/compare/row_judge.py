"""Judge rows of one operation: measure their errors, bound them, and find the convention that the engine follows.

Choices of a router are judged like tokens. A row may choose other experts than the high-precision model does on the
same input if their scores are equal within rounding (a tie). The output of the experts is then judged for the choice of
the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from harness.base.metrics import largest_rounding, rounding_unit, row_errors
from harness.base.numerics import Numerics
from harness.formats.taps import KINDS, ErrorModel, Kind
from harness.judge.compare.align import Rows
from harness.judge.compare.bounds import CONTROL_FACTOR, UNRECORDED_FACTOR, Sensitivity, control_bound, derived_bound
from harness.judge.compare.conventions import Rounding, SuspectRows, conventions
from harness.judge.compare.conventions.entry import HALF
from harness.judge.compare.evidence import guarded
from harness.judge.compare.projected import column_norms2
from harness.judge.compare.replay import TapRows
from harness.judge.compare.sequences import NOWHERE
from harness.oracle.attention import attention_sensitivity, of_queries
from harness.oracle.model import HFModel
from harness.oracle.watch import AttentionCall
from harness.results.check import Effect


def choice_errors(rows: TapRows) -> torch.Tensor:
    """Return the distance of each row's choice from the truth's, as a multiple of what rounding allows: [rows] float64.

    The distance is the highest score that only the truth chose, minus the lowest score that only the engine chose, both
    by the scores of the truth. It is infinite if an index does not exist or occurs twice. Scores of -inf are masked; if
    there are too few finite scores, any masked one may be chosen. Rounding allows twice the largest error that the
    scores of HF have in the engine's dtype, in that row or in the median row, and at least one rounding of the scores.
    """
    scores = rows.value.scores
    assert scores is not None
    s = scores[rows.places.to(scores.device)].to(torch.float64).reshape(-1, scores.shape[-1])
    chosen, meant = (x.to(s.device, torch.int64).reshape(len(s), -1) for x in (rows.actual, rows.expected))
    distance = _distances(s, chosen, meant).view(len(rows.places), -1).amax(dim=1)
    noise = torch.zeros_like(distance)
    if rows.control_scores is not None:
        noise = _noise(s, rows.control_scores.reshape(s.shape)).view(len(rows.places), -1).amax(dim=1)
    allowed = 2 * noise.clamp(min=float(noise.median()))
    return torch.where(distance == 0, 0.0, distance / allowed).cpu()


def _distances(s: torch.Tensor, chosen: torch.Tensor, meant: torch.Tensor) -> torch.Tensor:
    """Return [rows] float64 for scores [rows, n], the indices of the engine [rows, k] and of the truth [rows, <= k]."""
    is_seen = s > -torch.inf
    ours, theirs = _members(chosen, s.shape[1]), _members(meant, s.shape[1]) & is_seen
    missed = s.masked_fill(~(theirs & ~ours), -torch.inf).amax(dim=1)
    extra = s.masked_fill(~(ours & ~theirs), torch.inf).amin(dim=1)
    distance = (missed - extra).clamp(min=0).nan_to_num(0.0, posinf=torch.inf)
    is_full = theirs.sum(dim=1) == chosen.shape[1]
    has_nonsense = (ours.sum(dim=1) < chosen.shape[1]) & (is_full | (missed > -torch.inf))
    return distance.masked_fill(has_nonsense, torch.inf)


def _members(indices: torch.Tensor, count: int) -> torch.Tensor:
    """Return [rows, count] bool: the scores that the indices [rows, k] select; invalid indices select none."""
    inside = (indices >= 0) & (indices < count)
    named = torch.zeros(len(indices), count + 1, dtype=torch.bool, device=indices.device)
    return named.scatter(1, indices.where(inside, count), True)[:, :count]


def _noise(s: torch.Tensor, control: torch.Tensor) -> torch.Tensor:
    """Return [rows] float64: the largest error of the scores of HF, and at least one rounding."""
    is_seen = s.isfinite() & control.isfinite()
    error = (control.to(torch.float64) - s).abs().where(is_seen, 0).amax(dim=1)
    return error.clamp(min=rounding_unit(control.dtype) * s.abs().where(is_seen, 0).amax(dim=1))


_OPEN_OF_ATTENTION = 0.5
"""Share of the bound without sensitivities above which the sensitivities of attention are measured. The verdict needs
them only above 1. In float32 they are most of the bound, so a report would otherwise show shares that are too large."""
_MAJORITY = 0.5
"""Share of rows that must fit the finer dtype for it to be the dtype of the operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalErrors:
    """Errors of the rows of one operation that was judged separately; tensors [rows] in the order of `rows`."""

    rows: Rows
    roundings: torch.Tensor
    """float64 errors; infinite if the row is not finite but should be, NaN if its inputs are not finite, so that it
    cannot be judged."""
    bound: torch.Tensor
    """float64: the largest error that rounding can explain."""
    dtype: torch.dtype | None = None
    """Dtype to which the tensors are rounded, which defines one rounding; None if no error is in roundings."""
    expected: torch.Tensor | None = None
    """[rows, W] expected values: those of the truth, or of the convention. Kept only while one batch is judged."""
    control: torch.Tensor | None = None
    """float64: error of the HF module in the engine's dtype on the same inputs; None if it was not run."""
    is_bounded_by_control: bool = False
    convention: str | None = None
    allowance: float = 0.0
    """Most roundings that the convention adds to the bound of a row; a systematic effect may be as large."""
    effect: Effect | None = None
    """Systematic effect of the errors over all rows, which the control does not have."""
    unrecorded: tuple[str, ...] = ()
    """Taps that HF recomputed because they were not recorded; empty if all inputs were recorded."""
    failures: tuple[str, ...] = ()
    """Conventions that raised an error and so could not be tried."""

    @property
    def bad(self) -> torch.Tensor:
        """[rows] bool: out of bounds."""
        return self.roundings > self.bound

    @property
    def num_bad(self) -> int:
        """Number of rows that are out of bounds."""
        return int(self.bad.sum())

    @property
    def is_exact(self) -> bool:
        """Whether no row has any error."""
        return bool((self.roundings == 0).all())

    @property
    def typical(self) -> float:
        """Mean error of the rows that can be judged; 0 if there are none."""
        known = self.roundings[self.roundings.isfinite()]
        return float(known.mean()) if len(known) else 0.0

    @staticmethod
    def concat(parts: Sequence["LocalErrors"]) -> "LocalErrors":
        """Join the errors of one operation in several batches."""
        controls = [part.control for part in parts if part.control is not None]
        conventions = [part.convention for part in parts if part.convention is not None]
        return replace(
            parts[-1],
            rows=Rows.concat([part.rows for part in parts]),
            roundings=torch.cat([part.roundings for part in parts]),
            bound=torch.cat([part.bound for part in parts]),
            control=torch.cat(controls) if len(controls) == len(parts) else None,
            is_bounded_by_control=any(part.is_bounded_by_control for part in parts),
            convention=conventions[-1] if conventions else None,
            allowance=max(part.allowance for part in parts),
        )


class RowJudge:
    """Judges rows of the operations of one engine."""

    def __init__(
        self, hf: HFModel, dtype: torch.dtype, usable: set[str], declared: Numerics, *, is_final: bool = True
    ) -> None:
        """Prepare to judge.

        Args:
            hf: the model.
            dtype: dtype of the engine and of the control.
            usable: recorded taps whose shape and dtype match.
            declared: arithmetic that the engine declares.
            is_final: whether wrong rows are not judged again; else they are judged under no convention.
        """
        self._hf, self._dtype, self._usable, self._declared, self._is_final = hf, dtype, usable, declared, is_final
        self._column_norms: dict[str, torch.Tensor] = {}
        self.failures: dict[str, list[str]] = {}
        """By tap: conventions that raised an error, and where."""

    def judge(self, rows: TapRows, *, dtype: torch.dtype | None = None) -> LocalErrors:
        """Judge rows in the dtype of the tensors of their operation.

        Args:
            rows: rows of one operation.
            dtype: dtype in which earlier rows of the operation were judged; None for the first rows.
        """
        if dtype is None and self._may_be_finer(rows):
            finer = self._judge_in(rows, torch.float32)
            if float(finer.bad.float().mean()) <= 1 - _MAJORITY:
                return finer
        return self._judge_in(rows, dtype or self._dtype)

    def _may_be_finer(self, rows: TapRows) -> bool:
        """Whether the tensors may have a finer dtype than the engine, and the truth an even finer one."""
        is_derived = not rows.unrecorded and KINDS[rows.operation.kind].error_model is not None
        if not is_derived or self._dtype not in HALF or rows.actual.dtype != torch.float32:
            return False
        is_on_grid = torch.equal(rows.actual.to(self._dtype).to(torch.float32), rows.actual)
        return rows.expected.dtype == torch.float64 and not is_on_grid

    def _judge_in(self, rows: TapRows, dtype: torch.dtype) -> LocalErrors:
        roundings, control = _roundings(rows.actual, rows.expected, dtype), None
        if rows.control is not None and dtype == self._dtype:
            control = _roundings(rows.control, rows.expected, dtype)
        bound, by_control = self._bound(rows, roundings, control, dtype)
        errors = LocalErrors(
            rows=rows.rows,
            roundings=roundings,
            bound=bound,
            dtype=dtype,
            expected=rows.expected,
            control=control,
            is_bounded_by_control=by_control,
        )
        if not self._is_final or self._is_through_values(rows) or not bool(errors.bad.any()):
            return errors
        best = self.under_best_convention(rows, errors)
        return errors if best is None or best.num_bad >= errors.num_bad else best

    def _is_through_values(self, rows: TapRows) -> bool:
        """Whether HF computed inputs that are not recorded, other than choices."""
        operations = self._hf.graph.by_tap
        return any(tap not in operations or operations[tap].kind is not Kind.CHOICE for tap in rows.unrecorded)

    def _bound(
        self, rows: TapRows, roundings: torch.Tensor, control: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, bool]:
        """Return the bound of each row, and whether the control made it."""
        model = KINDS[rows.operation.kind].error_model
        if rows.unrecorded or model is None:
            factor = UNRECORDED_FACTOR if rows.unrecorded else CONTROL_FACTOR
            if control is None or rows.control is None:
                none = roundings.new_zeros(len(roundings))
                return control_bound(none, dtype, rows.expected, factor=factor, model=model), True
            more = _is_rounded(rows.actual, dtype) & ~_is_rounded(rows.control, dtype)
            bound = control_bound(control, dtype, rows.expected, factor=factor, model=model)
            # The control runs as prefill, where HF may round once less than in decode.
            return bound + largest_rounding(dtype) * more, True
        bound = self._derived_bound(model, rows, roundings, control, dtype)
        if control is None or not bool((control > bound).any()):
            return bound, False
        # The HF module rounds more than the error model assumes, so the model does not apply.
        by_control = control_bound(control, dtype, rows.expected, factor=CONTROL_FACTOR, model=model)
        return torch.maximum(bound, by_control), True

    def _derived_bound(
        self,
        model: ErrorModel,
        rows: TapRows,
        roundings: torch.Tensor,
        control: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the bound of each row. Sensitivities only increase it, and are measured only where they can matter."""
        bound = derived_bound(model, dtype, Sensitivity(), rows.expected)
        share = _OPEN_OF_ATTENTION if rows.operation.kind is Kind.ATTENTION else 1.0
        is_open = roundings > share * bound
        if control is not None:
            is_open = is_open | (control > share * bound)
        if bool(is_open.any()):
            some = rows.select(is_open)
            bound[is_open] = derived_bound(model, dtype, self._sensitivity(some), some.expected)
        return bound

    def bound_if_wrong(self, rows: TapRows, errors: LocalErrors, bound: torch.Tensor) -> torch.Tensor:
        """Return the bounds [R] that sound rows would have if they were wrong: then sensitivities are measured."""
        model = KINDS[rows.operation.kind].error_model
        if model is None or rows.unrecorded or errors.dtype is None:
            return bound
        return torch.maximum(bound, derived_bound(model, errors.dtype, self._sensitivity(rows), rows.expected))

    def _sensitivity(self, rows: TapRows) -> Sensitivity:
        if rows.operation.kind is Kind.ATTENTION and rows.value.call is not None:
            return _attention_sensitivity(rows)
        if rows.operation.kind is Kind.LINEAR:
            return self._linear_sensitivity(rows)
        return Sensitivity()

    def _linear_sensitivity(self, rows: TapRows) -> Sensitivity:
        weight = getattr(self._hf.module(rows.operation.module), "weight", None)
        (x,) = (tensor.flatten(1) for tensor in rows.inputs())
        if not isinstance(weight, torch.Tensor) or x.shape[1] not in weight.shape:
            return Sensitivity()
        norms = self._column_norms.get(rows.operation.tap)
        if norms is None:
            norms = self._column_norms[rows.operation.tap] = column_norms2(weight, x.shape[1])
        scale = (x.square() @ norms.to(x.device, x.dtype)).sqrt()
        norm = torch.linalg.vector_norm(rows.expected, dim=1)
        return Sensitivity(amplification=(scale / norm).to("cpu", torch.float64))

    def under_best_convention(self, rows: TapRows, errors: LocalErrors) -> LocalErrors | None:
        """Judge rows under each convention that applies; return the errors with the fewest bad rows, then the smallest.

        Return None if no convention applies.
        """
        assert errors.dtype is not None
        subject, sensitivity = self._subject(rows, errors.dtype), self._sensitivity(rows)
        failures, best = self.failures.setdefault(rows.operation.tap, []), None
        for convention in conventions(rows.operation.kind):
            with guarded(convention.name, failures):
                for rounding in convention.alternatives(subject):
                    under = _under(rounding, rows, errors, sensitivity)
                    if best is None or (under.num_bad, under.typical) < (best.num_bad, best.typical):
                        best = under
        return best

    def _subject(self, rows: TapRows, dtype: torch.dtype) -> SuspectRows:
        operation = rows.operation
        return SuspectRows(
            hf=self._hf,
            operation=operation,
            dtype=dtype,
            actual=rows.actual.to(rows.expected.device),
            expected=rows.expected,
            rows=rows.places.to(rows.expected.device),
            positions=rows.rows.position + operation.positions_ahead,
            inputs=[] if operation.kind is Kind.ATTENTION else rows.inputs(),
            call=rows.value.call,
            recorded=lambda tap: _recorded(rows, tap) if tap in self._usable else None,
            declared=self._declared,
        )


def _recorded(rows: TapRows, tap: str) -> torch.Tensor | None:
    """Return another tap at the same rows, [R, ...]; None if it was not recorded at all of them."""
    recorded = rows.batch.recorded(tap)
    if recorded is None:
        return None
    where = torch.full((rows.batch.num_places,), NOWHERE, dtype=torch.int64)
    where[recorded.places] = torch.arange(len(recorded.places))
    at = where[rows.places]
    return None if bool((at == NOWHERE).any()) else recorded.rows[at].to(rows.expected.device)


def _under(rounding: Rounding, rows: TapRows, errors: LocalErrors, sensitivity: Sensitivity) -> LocalErrors:
    """Judge rows under one convention."""
    expected = rounding.expected().to(rows.expected.device)
    assert errors.dtype is not None
    roundings = _roundings(rows.actual, expected, errors.dtype)
    bound = derived_bound(rounding.model, errors.dtype, sensitivity, expected)
    return replace(
        errors,
        roundings=torch.where(errors.roundings.isnan(), torch.nan, roundings),
        bound=bound if rounding.allowance is None else bound + rounding.allowance,
        expected=expected,
        convention=rounding.name,
        allowance=0.0 if rounding.allowance is None or not len(rounding.allowance) else float(rounding.allowance.max()),
    )


def _is_rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[R] bool: rows whose elements are all numbers of `dtype`."""
    return (x.to(dtype).to(x.dtype) == x).flatten(1).all(dim=1).cpu()


def _roundings(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[R] float64: errors in roundings; infinite where only the actual row is not finite, NaN where both."""
    error = row_errors(actual.to(expected.device), expected).cpu() / rounding_unit(dtype)
    odd = ~error.isfinite()  # only such rows can hold values that are not finite
    if bool(odd.any()):
        at = odd.to(actual.device)
        error[odd] = torch.where(actual[at].isfinite().all(dim=1).cpu(), error[odd], torch.inf)
        is_expected_finite = expected[odd.to(expected.device)].isfinite().all(dim=1).cpu()
        error[odd] = torch.where(is_expected_finite, error[odd], torch.nan)
    return error


def _attention_sensitivity(rows: TapRows) -> Sensitivity:
    call, at = judged_queries(rows)
    sensitivity = attention_sensitivity(call)
    both = sensitivity.amplification, sensitivity.score_sensitivity
    amplification, scores = (x.flatten()[at.to(x.device)].to("cpu", torch.float64) for x in both)
    return Sensitivity(amplification=amplification, score_sensitivity=scores)


def judged_queries(rows: TapRows) -> tuple[AttentionCall, torch.Tensor]:
    """Return the call of attention with only the judged queries, and the index of each row among these."""
    call = rows.value.call
    assert call is not None
    num_queries = call.query.shape[2]
    line, position = rows.places // num_queries, rows.places % num_queries
    positions = position.unique()
    if len(positions) == num_queries:
        return call, rows.places
    return of_queries(call, positions), line * len(positions) + torch.searchsorted(positions, position)
