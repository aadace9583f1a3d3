"""How large a local error rounding can explain, row by row.

The model of an operation's rounding (derived in docs/how-verdicts-work.md), all in units of one rounding:

    bound = roundings * largest + accumulation * (1 + amplification) * fine + scores * score_sensitivity * fine
            + products * amplification + underflow

`largest` (about 2.3) is the largest relative error of one rounding over its RMS: a row dominated by one channel reaches
it. `fine` is the rounding of the accumulator (float32, whatever the engine's dtype) in units of the engine's dtype:
1 in float32, 1.5e-5 in bfloat16. The amplifications are measured per row by the replay, so a row whose terms cancel
gets the room it needs and no other row does. The constants are measured: reports/cpu/noise-floors.md.
"""

import math
from dataclasses import dataclass

import torch

from harness.metrics import RowMetrics, largest_rounding, rounding_unit
from harness.oracle.replay import Replayed
from harness.taps import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorModel:
    """How often and where an operation of one kind rounds."""

    roundings: float
    """Roundings of the whole row to the engine's dtype, the worst case adding up."""
    accumulation: float = 0.0
    """Errors of a float32 sum, in roundings of the accumulator."""
    products: float = 0.0
    """Roundings of the summed products to the engine's dtype (attention's probabilities)."""
    scores: float = 0.0
    """Errors of the attention scores, in roundings of the accumulator."""


ERROR_MODELS: dict[Kind, ErrorModel] = {
    Kind.EMBEDDING: ErrorModel(roundings=0),
    Kind.LINEAR: ErrorModel(roundings=1, accumulation=25),
    Kind.NORM: ErrorModel(roundings=2, accumulation=8),
    Kind.ROTARY: ErrorModel(roundings=3),
    Kind.ADD: ErrorModel(roundings=1),
    Kind.ACTIVATION: ErrorModel(roundings=2, accumulation=4),
    Kind.ATTENTION: ErrorModel(roundings=1, accumulation=25, products=4, scores=6),
}

EAGER_MODEL = ErrorModel(roundings=1, accumulation=25, products=8)
"""Attention against HF's eager code in the engine's dtype: a product of another shape lets a few scores round the other
way, each by a whole rounding."""


def local_bound(model: ErrorModel, dtype: torch.dtype, replayed: Replayed, metrics: RowMetrics) -> torch.Tensor:
    """Return the largest local error, in roundings, that each row may show: [rows] float64."""
    fine = rounding_unit(torch.float32) / rounding_unit(dtype)
    one = torch.ones_like(metrics.expected_norm)
    amplification = one * 0 if replayed.amplification is None else replayed.amplification.cpu()
    sensitivity = one * 0 if replayed.score_sensitivity is None else replayed.score_sensitivity.cpu()
    bound = (
        model.roundings * largest_rounding(dtype)
        + model.accumulation * (1 + amplification) * fine
        + model.products * amplification
        + model.scores * sensitivity * fine
    )
    if model.roundings == 0:
        return bound
    return bound + _underflow(dtype, replayed.expected, metrics.expected_norm)


def _underflow(dtype: torch.dtype, expected: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Room for values below the smallest normal number: their rounding is absolute, a subnormal step each."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    num_elements = expected[0].numel() if len(expected) else 1
    absolute = math.sqrt(num_elements) * smallest
    return torch.where(norm > 0, absolute / (norm * rounding_unit(dtype)), 0.0)
