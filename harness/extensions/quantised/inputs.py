"""Inputs of products that a quantised checkpoint declares to be quantised: int8 or float8, with scales of their own.

`R` rows, `I` inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from harness.extensions.quantised.config import InputScheme

_HALF = (torch.bfloat16, torch.float16)
_INT8, _FLOAT8 = 127.0, 448.0
_WIDER = 127.5
"""Of compressed-tensors: 256 values between minus and plus the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRounding:
    """One way to quantise the inputs of a product under a scheme."""

    scheme: InputScheme
    largest: float
    """The code that the largest magnitude becomes."""
    dtype: torch.dtype = torch.float32
    """In which scales and codes are computed."""
    scale: float | None = None
    """The scale itself, if it is static."""
    power: bool = False
    """Whether scales are rounded up to powers of two."""

    def steps(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs [R, I] in units of their steps, and the steps: both [R, I] float64."""
        values = x.to(getattr(torch, self.scheme.rounded_to)) if self.scheme.rounded_to else x
        values = values.to(self.dtype)
        size = self.scheme.group if self.scheme.share == "group" and self.scheme.group else x.shape[1]
        groups = values.unflatten(1, (-1, size))
        if self.scale is None:
            scale = groups.abs().amax(dim=-1, keepdim=True) / self.largest
            scale = torch.exp2(scale.log2().ceil()) if self.power else scale
        else:
            scale = torch.full_like(groups[..., :1], self.scale)
        scale = torch.where(scale > 0, scale, 1)
        codes = (groups.to(torch.float64) / scale.to(torch.float64)).flatten(1)
        codes = codes.to(self.dtype).to(torch.float64) if self.dtype in _HALF else codes
        spread = scale.to(torch.float64).expand_as(groups).flatten(1)
        if self.scheme.dtype == "int8":
            return codes.clamp(-128, 127), spread
        codes = codes.clamp(-_FLOAT8, _FLOAT8)
        unit = torch.exp2((torch.frexp(codes).exponent - 1).clamp(min=-6).to(torch.float64) - 3)
        return codes / unit, spread * unit

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return inputs [R, I] as the product sees them, float64."""
        scaled, step = self.steps(x)
        return (scaled.round() * step).to(self.dtype if self.dtype in _HALF else torch.float64).to(torch.float64)


def by_rows(scheme: InputScheme) -> InputScheme:
    """Return a scheme with a scale for each token in the place of one for all: engines take that, and see all rows."""
    return replace(scheme, share="token") if scheme.share == "tensor" and not scheme.is_static else scheme


def ways_to_round(scheme: InputScheme, scale: float | None, dtype: torch.dtype) -> Iterator[InputRounding]:
    """Yield the ways in which engines compute the codes of one scheme, in float32 or in their own dtype."""
    for used in dict.fromkeys((torch.float32, dtype)):
        for largest in (_INT8, _WIDER) if scheme.dtype == "int8" else (_FLOAT8,):
            yield InputRounding(scheme=scheme, largest=largest, dtype=used, scale=scale)
        if scheme.share == "group" and scale is None:
            yield InputRounding(scheme=scheme, largest=_FLOAT8, dtype=used, power=True)
