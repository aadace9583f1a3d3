"""The largest local error that rounding can explain, row by row.

For known kinds of operation, the bound is derived (docs/how-verdicts-work.md), in units of one rounding:

    bound = roundings * largest + accumulation * (1 + amplification) * fine + scores * score_sensitivity * fine
            + products * amplification + underflow

`largest` (about 2.3) is the largest relative error of one rounding over its RMS. A row that one channel dominates
can reach it. `fine` is the rounding of the accumulator (float32, whatever the engine's dtype) in units of the engine's
dtype: 1 in float32, 1.5e-5 in bfloat16. The amplifications are measured per row, so only a row whose terms cancel gets
a larger bound. The constants are measured: reports/cpu/noise-floors.md.

Any other operation is bounded by its *control*: the error of the HF module in the engine's dtype on the same inputs.
"""

import math
from dataclasses import dataclass

import torch

from harness.base.metrics import largest_rounding, rounding_unit
from harness.formats.taps import ErrorModel

CONTROL_FACTOR = 4.0
"""Largest allowed ratio of the error of a row to that of its control, for one operation (reports/cpu/families.md)."""
UNRECORDED_FACTOR = 10.0
"""The same ratio across taps that were not recorded, where the errors of several operations add up."""
_ONE_OPERATION = ErrorModel(roundings=1, accumulation=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Amplification of rounding inside an operation, per row: float64 [rows]; None for no amplification."""

    amplification: torch.Tensor | None = None
    """Ratio of the relative error of a row to that of the products summed in it, which is large if they cancel. Linear:
    sqrt(sum_jk w_jk^2 x_k^2) / ||y||. Attention: see `attention_sensitivity`."""
    score_sensitivity: torch.Tensor | None = None
    """Attention only: relative change of the row per relative rounding of the scores."""


def derived_bound(
    model: ErrorModel, dtype: torch.dtype, sensitivity: Sensitivity, expected: torch.Tensor
) -> torch.Tensor:
    """Return the largest local error, in roundings, that each row may show: [rows] float64.

    Args:
        model: how often and where the operation rounds.
        dtype: dtype of the engine.
        sensitivity: sensitivity of the rows.
        expected: [rows, ...] expected values.
    """
    fine = rounding_unit(torch.float32) / rounding_unit(dtype)
    bound = torch.full((len(expected),), model.roundings * largest_rounding(dtype), dtype=torch.float64)
    amplification = 0.0 if sensitivity.amplification is None else sensitivity.amplification
    scores = 0.0 if sensitivity.score_sensitivity is None else sensitivity.score_sensitivity
    bound = (
        bound
        + model.accumulation * (1 + amplification) * fine
        + model.products * amplification
        + model.scores * scores * fine
    )
    if model.roundings:
        bound = bound + _underflow(dtype, expected)
    return torch.nan_to_num(bound, nan=0.0)


def _underflow(dtype: torch.dtype, expected: torch.Tensor) -> torch.Tensor:
    """Return the bound for subnormal values, whose rounding is absolute: one subnormal step per value."""
    norm = torch.linalg.vector_norm(expected.flatten(1), dim=1).to("cpu", torch.float64)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    absolute = math.sqrt(max(1, expected[0].numel() if len(expected) else 1)) * smallest
    return torch.where(norm > 0, absolute / (norm * rounding_unit(dtype)), 0.0)


def control_bound(
    control: torch.Tensor, dtype: torch.dtype, expected: torch.Tensor, *, factor: float, model: ErrorModel | None = None
) -> torch.Tensor:
    """Return the largest local error that each row may show, from the error of its control.

    Args:
        control: [rows] float64, errors of the control in roundings.
        dtype: dtype of the engine.
        expected: [rows, ...] expected values; where they are subnormal, a step counts as often as `factor`.
        factor: largest allowed ratio of the error to that of the control.
        model: error model of the operation, which gives the least bound; None for that of one rounding.
    """
    fine = rounding_unit(torch.float32) / rounding_unit(dtype)
    floor_model = model or _ONE_OPERATION
    floor = floor_model.roundings * largest_rounding(dtype) + floor_model.accumulation * fine
    known = control[control.isfinite()]
    # HF may be exact in a row by chance, so the median over the rows is the least error assumed.
    typical = float(known.median()) if len(known) else 0.0
    noise = control.nan_to_num(nan=typical, posinf=typical).clamp(min=typical)
    return floor + factor * (noise + _underflow(dtype, expected))
