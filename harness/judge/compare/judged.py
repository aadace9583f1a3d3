"""The judgement on one tap, and its form in a result: metrics, findings, and the first divergence."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from harness.errors import Code
from harness.formats.recording import Recording
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.align import Rows, step_rows
from harness.judge.compare.propagated import PropagatedErrors, Propagation
from harness.judge.compare.row_judge import LocalErrors
from harness.results.check import Divergence, Effect, Finding, RowId, TapResult, Verdict


@dataclass(frozen=True, kw_only=True)
class TapJudgement:
    """All judgements on one tap."""

    operation: Operation
    errors: LocalErrors | None
    """Errors by replay on the inputs of the engine, or of a cache read back. If present, they decide the verdict."""
    propagated: PropagatedErrors | None
    """Errors relative to the golden."""
    is_in_graph: bool
    """Whether the tap is in the graph; otherwise its errors are measured, but not judged."""

    @property
    def rows(self) -> Rows:
        """The rows that were judged."""
        source = self.errors or self.propagated
        assert source is not None
        return source.rows

    @cached_property
    def bad(self) -> torch.Tensor:
        """[rows] bool: out of bounds by the errors that decide the verdict."""
        if self.errors is not None:
            return self.errors.bad
        assert self.propagated is not None
        if not self.is_in_graph:
            return torch.zeros(len(self.rows), dtype=torch.bool)
        return self.propagated.is_bad

    @property
    def is_bad(self) -> bool:
        """Whether any row is out of bounds."""
        return bool(self.bad.any())

    @cached_property
    def effect(self) -> Effect | None:
        """The systematic effect over all rows, if no single row is out of bounds."""
        return None if self.is_bad or self.errors is None else self.errors.effect

    @property
    def is_wrong(self) -> bool:
        """Whether a row is out of bounds, or the rows have a systematic effect."""
        return self.is_bad or self.effect is not None

    @cached_property
    def first_bad(self) -> int:
        """Index of the first bad row by (request, position)."""
        return self.rows.first(self.bad)

    @property
    def code(self) -> Code:
        """The error code of the first bad row, or of the systematic effect."""
        if self.effect is not None:
            return Code.SYSTEMATIC_ERROR
        at, errors = self.first_bad, self.errors
        if errors is None:
            assert self.propagated is not None
            return Code.PROPAGATED_ERROR if self.propagated.metrics.is_finite[at] else Code.NOT_FINITE
        if self.operation.is_kept:
            return Code.STATE_DIFFERS if self.operation.kind is Kind.STATE else Code.CACHE_DIFFERS
        is_finite = self.operation.kind is Kind.CHOICE or bool(torch.isfinite(errors.roundings[at]))
        return Code.LOCAL_ERROR if is_finite else Code.NOT_FINITE

    @property
    def verdict(self) -> Verdict:
        """The verdict on the operation."""
        if self.is_bad:
            return Verdict.BUG
        if self.errors is None:
            assert self.propagated is not None
            if float(self.propagated.ratio.max()) == 0:
                return Verdict.EXACT
            return Verdict.NOISE if self.is_in_graph else Verdict.UNJUDGED
        if self.errors.is_exact and not (self.operation.is_kept and self.errors.convention):
            return Verdict.EXACT
        if self.effect is not None:
            return Verdict.SYSTEMATIC
        return Verdict.CONVENTION if self.errors.convention else Verdict.NOISE

    @cached_property
    def only_propagated(self) -> torch.Tensor:
        """[propagated rows] bool: those without errors by replay, which lacks what they were computed from."""
        if self.errors is None or self.propagated is None or self.operation.is_kept:
            return torch.zeros(0 if self.propagated is None else len(self.propagated.rows), dtype=torch.bool)
        return ~torch.isin(self.propagated.rows.keys, self.errors.rows.keys)

    def ratio_at(self, at: int) -> float | None:
        """Return the ratio of the propagated error of a row to that of HF; None if the golden does not have the row."""
        if self.propagated is None:
            return None
        request, position = self.rows.request[at], self.rows.position[at]
        here = (self.propagated.rows.request == request) & (self.propagated.rows.position == position)
        return float(self.propagated.ratio[here].max()) if bool(here.any()) else None


def judge(graph: Graph, errors: Mapping[str, LocalErrors], propagation: Propagation) -> list[TapJudgement]:
    """Combine the errors of each tap into judgements, in the order of the graph; taps outside of it come last."""
    known = graph.by_tap
    others = [Operation(tap=tap, kind=Kind.OTHER) for tap in propagation.errors if tap not in known]
    return [
        TapJudgement(
            operation=operation,
            errors=errors.get(operation.tap),
            propagated=propagation.errors.get(operation.tap),
            is_in_graph=operation.tap in known,
        )
        for operation in (*graph, *others)
        if operation.tap in errors or operation.tap in propagation.errors
    ]


def bad_finding(judged: TapJudgement) -> Finding:
    """Return the finding on a tap with bad rows."""
    at, tap, code = judged.first_bad, judged.operation.tap, judged.code
    request, position = int(judged.rows.request[at]), int(judged.rows.position[at])
    count = f"{int(judged.bad.sum())} of {len(judged.rows)} rows, the first at request {request}, position {position}"
    errors = judged.errors
    if code is Code.NOT_FINITE:
        clause = " though its inputs are" if errors else ""
        message = f"{tap} is not finite{clause} in {count}"
    elif code is Code.CACHE_DIFFERS:
        message = f"{tap} read back through the block table differs from what was written in {count}"
    elif code is Code.STATE_DIFFERS:
        assert errors is not None
        share = f"{float(errors.roundings[at]):.3g} roundings, bound {float(errors.bound[at]):.3g}"
        message = f"{tap} read back is not the state after the rows before it, in {count}: {share}"
    elif errors is not None and judged.operation.kind is Kind.CHOICE:
        message = f"{tap} chose other indices than HF does from the same scores in {count}: {_distance(judged)}"
    elif errors is not None:
        share = f"{float(errors.roundings[at]):.3g} roundings, bound {float(errors.bound[at]):.3g}"
        way = f", computed through {len(errors.unrecorded)} taps that were not recorded" if errors.unrecorded else ""
        message = f"{tap} is out of bounds in {count}: {share}{way}"
    elif judged.propagated is not None and not judged.propagated.has_noise:
        bound = f"bound {judged.propagated.bound:.3g}"
        message = f"{tap} differs by {judged.ratio_at(at):.3g} times what rounding adds up to ({bound}) in {count}"
    else:
        message = f"{tap} is {judged.ratio_at(at):.3g} times as far from the truth as HF in {count}"
    message += _not_tried(judged)
    return Finding(code=code, message=message, tap=tap, request=request, position=position)


def rest_finding(judged: TapJudgement) -> Finding | None:
    """Return the finding on rows that only propagation judges, of a tap of which replay judges others; or None."""
    if judged.propagated is None or not judged.propagated.has_noise:
        return None
    bad = judged.only_propagated & judged.propagated.is_bad
    if not bool(bad.any()):
        return None
    at, tap = judged.propagated.rows.first(bad), judged.operation.tap
    request, position = int(judged.propagated.rows.request[at]), int(judged.propagated.rows.position[at])
    message = (
        f"{tap} is {float(judged.propagated.ratio[at]):.3g} times as far from the truth as HF in {int(bad.sum())} of "
        f"{int(judged.only_propagated.sum())} rows that only propagation judges, since their inputs were not recorded, "
        f"the first at request {request}, position {position}"
    )
    return Finding(code=Code.PROPAGATED_ERROR, message=message, tap=tap, request=request, position=position)


def _not_tried(judged: TapJudgement) -> str:
    """Return a note of the conventions that raised, so that the operation was not judged under them."""
    failures = () if judged.errors is None else judged.errors.failures
    return f"; conventions that could not be tried: {', '.join(failures)}" if failures else ""


def _distance(judged: TapJudgement) -> str:
    assert judged.errors is not None
    distance = float(judged.errors.roundings[judged.first_bad])
    if math.isfinite(distance):
        return f"their scores lie {distance:.3g} times as far below as rounding explains"
    return "an index does not exist, or is there twice"


def choice_finding(tap: str, rows: Rows) -> Finding:
    """Return the finding on a router that chose other indices and was not replayed; ties are unknown without scores."""
    at = rows.first(torch.ones(len(rows), dtype=torch.bool))
    request, position = int(rows.request[at]), int(rows.position[at])
    message = (
        f"{tap} chose other indices than EXPECTED in {len(rows)} rows, the first at request {request}, position "
        f"{position}; whether their scores are tied, --model tells"
    )
    return Finding(code=Code.PROPAGATED_ERROR, message=message, tap=tap, request=request, position=position)


def systematic_finding(judged: TapJudgement) -> Finding:
    """Return the finding on a tap whose rows are within their bounds, but have a systematic effect."""
    effect, tap = judged.effect, judged.operation.tap
    assert effect is not None
    what = f"{effect.kind} {effect.which}".strip()
    message = (
        f"{tap} has a {what} of {effect.size:+.3g} ({effect.low:+.3g} to {effect.high:+.3g} at 95 %), "
        f"{abs(effect.roundings):.2g} roundings, in {effect.num_rows} rows (t = {abs(effect.statistic):.3g}): "
        f"rounding has no direction{_not_tried(judged)}"
    )
    return Finding(code=judged.code, message=message, tap=tap)


def oracle_finding(propagation: Propagation) -> Finding | None:
    """Return the finding on the first tap whose expected side is not finite; None if there is none."""
    for tap, errors in propagation.errors.items():
        broken = ~torch.isfinite(errors.metrics.expected_norm)
        if bool(broken.any()):
            at = errors.rows.first(broken)
            request, position = int(errors.rows.request[at]), int(errors.rows.position[at])
            message = f"the expected side of {tap} is not finite at request {request}, position {position}"
            return Finding(code=Code.ORACLE_NOT_FINITE, message=message, tap=tap, request=request, position=position)
    return None


def tap_result(judged: TapJudgement) -> TapResult:
    """Return the metrics of one tap over all its rows."""
    errors, propagated = judged.errors, judged.propagated
    judged_by = "propagated" if judged.is_in_graph else "none"
    if errors is not None:
        judged_by = "cache" if judged.operation.is_kept else "local"
    figures: dict[str, Any] = {} if errors is None else _local_figures(errors)
    figures |= {} if propagated is None else _propagated_figures(propagated)
    score = errors.roundings if errors is not None else propagated.ratio if propagated is not None else torch.empty(0)
    at = int(torch.nan_to_num(score, nan=-1.0).argmax())
    return TapResult(
        name=judged.operation.tap,
        site=judged.operation.site,
        layer=judged.operation.layer,
        kind=judged.operation.kind.value,
        num_rows=len(judged.rows),
        verdict=judged.verdict,
        judged_by=judged_by,
        convention=errors.convention if errors else None,
        worst=_row_id(judged, at),
        num_bad_rows=int(judged.bad.sum()),
        first_bad=_row_id(judged, judged.first_bad) if judged.is_bad else None,
        through=judged.errors.unrecorded if judged.errors else (),
        is_bounded_by_control=errors is not None and errors.is_bounded_by_control,
        effect=judged.errors.effect if judged.errors and not judged.is_bad else None,
        **figures,
    )


def _row_id(judged: TapJudgement, at: int) -> RowId:
    """Return the row, and the index of its element with the largest error if that was measured."""
    request, position = int(judged.rows.request[at]), int(judged.rows.position[at])
    index = -1
    if judged.propagated is not None:
        rows = judged.propagated.rows
        here = (rows.request == request) & (rows.position == position) & (rows.step == judged.rows.step[at])
        index = int(judged.propagated.metrics.worst_index[here].max()) if bool(here.any()) else -1
    return RowId(request=request, position=position, index=None if index < 0 else index)


def _local_figures(errors: LocalErrors) -> dict[str, float]:
    known = errors.roundings[~errors.roundings.isnan()]
    if not len(known):
        return {}
    share = torch.where(known == 0, 0.0, known / errors.bound[~errors.roundings.isnan()])
    return _control_figures(errors) | {
        "local_roundings_median": float(known.median()),
        "local_roundings_p99": float(known.quantile(0.99)) if bool(known.isfinite().all()) else float(known.max()),
        "local_roundings_max": float(known.max()),
        "local_bound_share_max": float(share.max()),
    }


def _control_figures(errors: LocalErrors) -> dict[str, float]:
    if errors.control is None or not bool((is_known := errors.control.isfinite()).any()):
        return {}
    control, bound = errors.control[is_known], errors.bound[is_known]
    return {
        "control_roundings_max": float(control.max()),
        "control_bound_share_max": float(torch.where(control == 0, 0.0, control / bound).max()),
    }


def _propagated_figures(propagated: PropagatedErrors) -> dict[str, float | int]:
    metrics = propagated.metrics
    by_element = {"max_abs": float(metrics.max_abs.max()), "max_ulp": float(metrics.max_ulp.max())}
    return ({} if metrics.is_estimated else by_element) | {
        "propagated_relative_l2_max": float(metrics.relative_l2.max()),
        "propagated_ratio_median": float(propagated.ratio.median()),
        "propagated_ratio_max": float(propagated.ratio.max()),
        "cosine_min": float(metrics.cosine.min()),
        "sqnr_db_min": float(metrics.sqnr_db.min()),
        "num_nan": metrics.num_nan,
        "num_inf": metrics.num_inf,
    }


def first_divergence(
    judged: Sequence[TapJudgement], misshapen: Collection[str], graph: Graph, actual: Recording
) -> Divergence | None:
    """Describe the first wrong operation: one with wrong values, or with a shape that cannot be judged."""
    order = {operation.tap: at for at, operation in enumerate(graph)}
    shape = min((tap for tap in misshapen if tap in order), key=order.__getitem__, default=None)
    wrong = _state_before(next((judgement for judgement in judged if judgement.is_wrong), None), judged)
    if shape is not None and (wrong is None or order[shape] < order.get(wrong.operation.tap, len(order))):
        return _of_shape(shape, actual) or (None if wrong is None else _of_values(wrong, actual))
    return None if wrong is None else _of_values(wrong, actual)


def _state_before(wrong: TapJudgement | None, judged: Sequence[TapJudgement]) -> TapJudgement | None:
    """Return the state that was wrong before the first wrong operation of its layer, which continues from it."""
    if wrong is None or not wrong.is_bad:
        return wrong
    first = int(wrong.rows.step[wrong.bad].min())
    states = (
        judgement
        for judgement in judged
        if judgement.operation.kind is Kind.STATE
        and judgement.operation.layer == wrong.operation.layer
        and judgement.is_bad
    )
    return next((state for state in states if int(state.rows.step[state.bad].min()) < first), wrong)


def _of_values(judged: TapJudgement, actual: Recording) -> Divergence:
    """Describe the first bad row of a wrong tap, or its first row if no single row is bad."""
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
    steps = ((step, step_rows(step, tap)) for step in actual.steps if tap in step.tap_names)
    step, rows = next(((step, rows) for step, rows in steps if len(rows)), (None, None))
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
