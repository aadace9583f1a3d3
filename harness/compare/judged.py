"""One tap with every judgement there is on it: what is bad, how, and how that is said."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from harness.compare.align import Rows
from harness.compare.local_judge import LocalErrors
from harness.compare.propagated import RATIO_BOUND, PropagatedErrors, Propagation
from harness.errors import Code
from harness.recording import Recording
from harness.results import Divergence, Finding, RowId, TapResult, Verdict
from harness.taps import Graph, Kind, Operation


@dataclass(frozen=True, kw_only=True)
class Judged:
    """All that is known of one tap."""

    operation: Operation
    local: LocalErrors | None
    """Replayed on the engine's own inputs."""
    cache: LocalErrors | None
    """Read back from the KV cache."""
    propagated: PropagatedErrors | None
    """Against the golden."""
    is_in_graph: bool
    """Whether propagation may judge it; a tap the graph does not know is measured only."""

    @property
    def errors(self) -> LocalErrors | None:
        """The sharpest judgement, where there is one besides propagation."""
        return self.local or self.cache

    @property
    def rows(self) -> Rows:
        """Identity of the rows judged."""
        source = self.errors or self.propagated
        assert source is not None
        return source.rows

    @cached_property
    def bad(self) -> torch.Tensor:
        """[rows] bool: out of bounds by the sharpest judgement there is."""
        if self.errors is not None:
            return self.errors.bad
        assert self.propagated is not None
        if not self.is_in_graph:
            return torch.zeros(len(self.rows), dtype=torch.bool)
        # Where the expected side is not finite there is nothing to hold finite rows to; that is a finding of its own.
        metrics = self.propagated.metrics
        is_far = ~(self.propagated.ratio <= RATIO_BOUND) & metrics.expected_norm.isfinite()
        return is_far | ~metrics.is_finite

    @property
    def is_bad(self) -> bool:
        """Whether any row is out of bounds."""
        return bool(self.bad.any())

    @property
    def is_systematic(self) -> bool:
        """Whether no row is out of bounds, and all of them are off in one direction."""
        return not self.is_bad and self.errors is not None and self.errors.effect is not None

    @cached_property
    def first_bad(self) -> int:
        """Index of the first bad row by (request, position)."""
        return self.rows.first(self.bad)

    @property
    def code(self) -> Code:
        """How the first bad row is bad."""
        at, errors = self.first_bad, self.errors
        if errors is None:
            assert self.propagated is not None
            return Code.PROPAGATED_ERROR if self.propagated.metrics.is_finite[at] else Code.NOT_FINITE
        if self.local is None:
            return Code.CACHE_DIFFERS
        return Code.LOCAL_ERROR if torch.isfinite(errors.roundings[at]) else Code.NOT_FINITE

    @property
    def verdict(self) -> Verdict:
        """What is to be thought of the operation."""
        if self.is_bad:
            return Verdict.BUG
        if self.errors is None:
            assert self.propagated is not None
            if float(self.propagated.ratio.max()) == 0:
                return Verdict.EXACT
            return Verdict.NOISE if self.is_in_graph else Verdict.UNJUDGED
        if self.errors.exact:
            return Verdict.EXACT
        if self.is_systematic:
            return Verdict.SYSTEMATIC
        return Verdict.CONVENTION if self.errors.convention else Verdict.NOISE

    def ratio_at(self, at: int) -> float | None:
        """Return the propagated error of a judged row over HF's own, where the row was compared with the golden."""
        if self.propagated is None:
            return None
        request, position = self.rows.request[at], self.rows.position[at]
        here = (self.propagated.rows.request == request) & (self.propagated.rows.position == position)
        return float(self.propagated.ratio[here].max()) if bool(here.any()) else None


def judge(
    graph: Graph, local: Mapping[str, LocalErrors], caches: Mapping[str, LocalErrors], propagation: Propagation
) -> list[Judged]:
    """Put the judgements of each tap together, in graph order; taps outside of the graph come last, unjudged."""
    known = graph.by_tap
    others = [Operation(tap=tap, kind=Kind.OTHER) for tap in propagation.errors if tap not in known]
    return [
        Judged(
            operation=operation,
            local=local.get(operation.tap),
            cache=caches.get(operation.tap),
            propagated=propagation.errors.get(operation.tap),
            is_in_graph=operation.tap in known,
        )
        for operation in (*graph, *others)
        if operation.tap in local or operation.tap in caches or operation.tap in propagation.errors
    ]


def divergence(judged: Judged, actual: Recording) -> Divergence:
    """Describe the first bad row of a bad tap, or the first row of all where the tap is systematically off."""
    errors = judged.errors
    at = judged.first_bad if judged.is_bad else judged.rows.first(torch.ones(len(judged.rows), dtype=torch.bool))
    step = int(judged.rows.step[at])
    return Divergence(
        tap=judged.operation.tap,
        request=int(judged.rows.request[at]),
        position=int(judged.rows.position[at]),
        verdict=judged.verdict,
        code=judged.code if judged.is_bad else Code.SYSTEMATIC_ERROR,
        local_roundings=None if errors is None else float(errors.roundings[at]),
        bound_roundings=None if errors is None else float(errors.bound[at]),
        propagated_ratio=judged.ratio_at(at),
        schedule=actual.manifest.schedule,
        step=step,
        phase=actual.steps[step].phase,
    )


def bad_finding(judged: Judged) -> Finding:
    """Say in words how a bad tap is bad."""
    at, tap, code = judged.first_bad, judged.operation.tap, judged.code
    request, position = int(judged.rows.request[at]), int(judged.rows.position[at])
    count = f"{int(judged.bad.sum())} of {len(judged.rows)} rows, the first at request {request}, position {position}"
    errors = judged.errors
    if code is Code.NOT_FINITE:
        clause = " though its inputs are" if judged.local else ""
        message = f"{tap} is not finite{clause} in {count}"
    elif code is Code.CACHE_DIFFERS:
        message = f"{tap} read back through the block table differs from what was written in {count}"
    elif errors is not None:
        share = f"{float(errors.roundings[at]):.3g} roundings, bound {float(errors.bound[at]):.3g}"
        way = f", computed through {len(errors.through)} taps that were not recorded" if errors.through else ""
        message = f"{tap} is out of bounds in {count}: {share}{way}"
    else:
        message = f"{tap} is {judged.ratio_at(at):.3g} times as far from the truth as HF in {count}"
    return Finding(code=code, message=message, tap=tap, request=request, position=position)


def systematic_finding(judged: Judged) -> Finding:
    """Say in words in which direction a tap is off."""
    assert judged.errors is not None
    assert judged.errors.effect is not None
    effect, tap = judged.errors.effect, judged.operation.tap
    what = f"{effect.kind} {effect.which}".strip()
    message = (
        f"{tap} has a {what} of {effect.size:+.3g} ({effect.low:+.3g} to {effect.high:+.3g} at 95 %), "
        f"{abs(effect.roundings):.2g} roundings, in {effect.num_rows} rows (t = {abs(effect.statistic):.3g}): "
        "rounding has no direction"
    )
    return Finding(code=Code.SYSTEMATIC_ERROR, message=message, tap=tap)


def oracle_finding(propagation: Propagation) -> Finding | None:
    """Say where the expected side is not finite, if it is so anywhere."""
    for tap, errors in propagation.errors.items():
        broken = ~torch.isfinite(errors.metrics.expected_norm)
        if bool(broken.any()):
            at = errors.rows.first(broken)
            request, position = int(errors.rows.request[at]), int(errors.rows.position[at])
            message = f"the expected side of {tap} is not finite at request {request}, position {position}"
            return Finding(code=Code.ORACLE_NOT_FINITE, message=message, tap=tap, request=request, position=position)
    return None


def tap_result(judged: Judged) -> TapResult:
    """Sum a tap up."""
    errors, propagated = judged.errors, judged.propagated
    by_propagation = "propagated" if judged.is_in_graph else "none"
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
        judged_by="local" if judged.local else "cache" if judged.cache else by_propagation,
        convention=errors.convention if errors else None,
        worst=_row_id(judged, at),
        num_bad_rows=int(judged.bad.sum()),
        first_bad=_row_id(judged, judged.first_bad) if judged.is_bad else None,
        through=judged.errors.through if judged.errors else (),
        is_bounded_by_control=errors is not None and errors.is_bounded_by_control,
        effect=judged.errors.effect if judged.errors and judged.is_systematic else None,
        **figures,
    )


def _row_id(judged: Judged, at: int) -> RowId:
    """Name a row, and within it the element that is furthest off where that was measured."""
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
    return {
        "propagated_relative_l2_max": float(metrics.relative_l2.max()),
        "propagated_ratio_median": float(propagated.ratio.median()),
        "propagated_ratio_max": float(propagated.ratio.max()),
        "max_abs": float(metrics.max_abs.max()),
        "max_ulp": float(metrics.max_ulp.max()),
        "cosine_min": float(metrics.cosine.min()),
        "sqnr_db_min": float(metrics.sqnr_db.min()),
        "num_nan": metrics.num_nan,
        "num_inf": metrics.num_inf,
    }
