"""The figures of one tap for the report: every judgement there is on it, summed up over its rows."""

from typing import Any

import torch

from harness.judge.compare.judged import TapJudgement
from harness.judge.compare.local_judge import LocalErrors
from harness.judge.compare.propagated import PropagatedErrors
from harness.results.check import RowId, TapResult


def tap_result(judged: TapJudgement) -> TapResult:
    """Sum a tap up."""
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
    """Name a row, and within it the element that is furthest off if that was measured."""
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
