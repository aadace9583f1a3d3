"""The largest local error that rounding can explain, row by row.

Of known kinds of operation the bound is derived (docs/how-verdicts-work.md), in units of one rounding:

    bound = roundings * largest + accumulation * (1 + amplification) * fine + scores * score_sensitivity * fine
            + products * amplification + underflow

`largest` (about 2.3) is the largest relative error of one rounding over its RMS. A row that one channel dominates
reaches it. `fine` is the rounding of the accumulator (float32, whatever the engine's dtype) in units of the engine's
dtype: 1 in float32, 1.5e-5 in bfloat16. The amplifications are measured per row, so a row whose terms cancel gets the
room it needs and no other row does. The constants are measured: reports/cpu/noise-floors.md.

Everything else is bounded by its *control*: what HF's own module loses in the engine's dtype on the same inputs.
"""

import math
from dataclasses import dataclass

import torch

from harness.base.metrics import largest_rounding, rounding_unit
from harness.formats.taps import ErrorModel

CONTROL_FACTOR = 4.0
"""The largest ratio of a row's error to its control's, in one operation (reports/cpu/families.md has those seen)."""
UNRECORDED_FACTOR = 10.0
"""The same where taps between were not recorded: errors of several operations, which add up in other ways."""
_ONE_OPERATION = ErrorModel(roundings=1, accumulation=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """By how much rounding inside an operation is amplified, row by row: float64 [rows] each, None for not at all."""

    amplification: torch.Tensor | None = None
    """By how much the relative error of a row exceeds that of the products summed in it, when they cancel. Linear:
    sqrt(sum_jk w_jk^2 x_k^2) / ||y||. Attention: see `attention_sensitivity`."""
    score_sensitivity: torch.Tensor | None = None
    """Attention only: relative change of the row per relative rounding of the scores."""


def derived_bound(
    model: ErrorModel, dtype: torch.dtype, sensitivity: Sensitivity, expected: torch.Tensor
) -> torch.Tensor:
    """Return the largest local error, in roundings, that each row may show: [rows] float64.

    Args:
        model: how often and where the operation rounds.
        dtype: the engine's.
        sensitivity: of the rows.
        expected: [rows, ...] what they should be.
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
    """Room for values below the smallest normal number: their rounding is absolute, a subnormal step each."""
    norm = torch.linalg.vector_norm(expected.flatten(1), dim=1).to("cpu", torch.float64)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    absolute = math.sqrt(max(1, expected[0].numel() if len(expected) else 1)) * smallest
    return torch.where(norm > 0, absolute / (norm * rounding_unit(dtype)), 0.0)


def control_bound(
    control: torch.Tensor, dtype: torch.dtype, *, factor: float, model: ErrorModel | None = None
) -> torch.Tensor:
    """Return the largest local error that each row may show where the control says what rounding does.

    Args:
        control: [rows] float64, the control's own errors in roundings.
        dtype: the engine's.
        factor: how many times its control's error a row may be off.
        model: of the operation itself, where it has one: its floor.
    """
    fine = rounding_unit(torch.float32) / rounding_unit(dtype)
    floor_model = model or _ONE_OPERATION
    floor = floor_model.roundings * largest_rounding(dtype) + floor_model.accumulation * fine
    known = control[control.isfinite()]
    # A row where HF happened to be exact says nothing of what rounding may do: the median is the least.
    typical = float(known.median()) if len(known) else 0.0
    return floor + factor * control.nan_to_num(nan=typical, posinf=typical).clamp(min=typical)
