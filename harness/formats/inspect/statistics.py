"""What is in a tensor, in figures, and how far two are apart."""

import math
import re
from typing import Any

import torch

from harness.errors import Code, HarnessError

NUM_BINS = 16
_SHOWN = 6
"""Values that are shown of each dimension's begin."""


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Return dtype, shape, statistics over the finite elements, a histogram and the first values, as JSON has them."""
    values = tensor.detach().to("cpu", torch.float64).flatten()
    finite = values[values.isfinite()]
    found: dict[str, Any] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "num_nan": int(values.isnan().sum()),
        "num_infinite": int(values.isinf().sum()),
        "num_zeros": int((values == 0).sum()),
    }
    if len(finite):
        found |= {
            "min": float(finite.min()),
            "max": float(finite.max()),
            "mean": float(finite.mean()),
            "rms": float(finite.square().mean().sqrt()),
            "std": float(finite.std(correction=0)),
            "histogram": _histogram(finite),
        }
    first = tensor[tuple(slice(0, _SHOWN) for _ in tensor.shape)]
    return found | {"first_values": _for_json(first.detach().to("cpu", torch.float64).tolist())}


def _for_json(values: Any) -> Any:
    """Return numbers as they are, and what is none (`nan`, `inf`) by its name."""
    if isinstance(values, list):
        return [_for_json(value) for value in values]
    return values if math.isfinite(values) else str(values)


def _histogram(values: torch.Tensor) -> dict[str, Any]:
    low, high = float(values.min()), float(values.max())
    if low == high:
        return {"edges": [low, high], "counts": [len(values)]}
    counts = torch.histc(values, bins=NUM_BINS, min=low, max=high)
    return {
        "edges": torch.linspace(low, high, NUM_BINS + 1, dtype=torch.float64).tolist(),
        "counts": counts.int().tolist(),
    }


def difference(first: torch.Tensor, second: torch.Tensor) -> dict[str, Any]:
    """Return how far the second tensor is from the first; raises HarnessError (BAD_OPTION) for other shapes."""
    if first.shape != second.shape:
        what = "tensors of different shapes cannot be compared"
        expected, actual = list(first.shape), list(second.shape)
        hint = "--slice takes the same part of each"
        raise HarnessError(Code.BAD_OPTION, what, where="BESIDE", expected=expected, actual=actual, hint=hint)
    own, other = (tensor.detach().to("cpu", torch.float64).flatten() for tensor in (first, second))
    apart = (other - own).abs()
    is_equal = (own == other) | (own.isnan() & other.isnan())
    found: dict[str, Any] = {"num_elements": len(own), "num_equal": int(is_equal.sum())}
    if len(own) and not is_equal.all():
        worst = int(apart.masked_fill(is_equal, -1).nan_to_num(nan=torch.inf).argmax())
        found |= {
            "max_difference": _for_json(float(apart[worst])),
            "at": [int(at) for at in torch.unravel_index(torch.tensor(worst), first.shape)],
            "values": _for_json([float(own[worst]), float(other[worst])]),
            "relative_l2": _for_json(float(apart.norm() / own.norm())),
            "cosine": _for_json(float(torch.nn.functional.cosine_similarity(own, other, dim=0))),
        }
    return found


_PART = re.compile(r"(-?\d+)?(:(-?\d+)?)?")


def sliced(tensor: torch.Tensor, text: str) -> torch.Tensor:
    """Return a part of a tensor: `0:4,:8,3` as Python writes it, without steps.

    Raises:
        HarnessError: BAD_OPTION.
    """
    parts = [part.strip() for part in text.split(",")]
    try:
        if len(parts) > tensor.dim():
            raise ValueError(f"{len(parts)} parts for {tensor.dim()} dimensions")
        return tensor[tuple(_part(part) for part in parts)]
    except (ValueError, IndexError) as error:
        what, expected = "this is no part of the tensor", f"such as 0:4,:8 of the shape {list(tensor.shape)}"
        raise HarnessError(
            Code.BAD_OPTION, what, where="--slice", expected=expected, actual=f"{text}: {error}"
        ) from error


def _part(text: str) -> int | slice:
    match = _PART.fullmatch(text)
    if match is None or not text:
        raise ValueError(f"{text!r} is neither a number nor a range")
    first, is_range, last = match.groups()
    return slice(first and int(first), last and int(last)) if is_range else int(first)
