"""Products of a quantised checkpoint: inputs quantised as it declares, weights that are not rounded after dequantising.

A checkpoint such as W8A8 says how the inputs of each product are quantised. An engine may do that, or multiply the
dequantised weight with the inputs as they are: both are right, and what it does otherwise is neither.

`R` rows, `I` inputs, `O` outputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from harness.formats.checkpoint.quantised.checkpoint import QuantisedWeight
from harness.formats.checkpoint.quantised.codes import Codes
from harness.formats.checkpoint.quantised.scheme import InputScheme
from harness.formats.taps import Kind
from harness.judge.compare.conventions.entry import HALF, Convention, Rounding, SuspectRows, dtype_name
from harness.judge.compare.conventions.linear import MODEL, product, weight_and_bias
from harness.judge.compare.conventions.quantised import product_of_integers
from harness.oracle.model import HFModel

EXACT_WEIGHT = "the dequantised weight not rounded to {}"
ROUNDED_SCALES = "the scales of the weight rounded to {}"
ROUNDED_FIRST = "the weight dequantised in {}, the dtype of its scales"
DECLARED_INPUTS = "inputs quantised to {}, as the checkpoint says"
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
        codes = codes.to(self.dtype).to(torch.float64) if self.dtype in HALF else codes
        spread = scale.to(torch.float64).expand_as(groups).flatten(1)
        if self.scheme.dtype == "int8":
            return codes.clamp(-128, 127), spread
        codes = codes.clamp(-_FLOAT8, _FLOAT8)
        unit = torch.exp2((torch.frexp(codes).exponent - 1).clamp(min=-6).to(torch.float64) - 3)
        return codes / unit, spread * unit

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return inputs [R, I] as the product sees them, float64."""
        scaled, step = self.steps(x)
        return (scaled.round() * step).to(self.dtype if self.dtype in HALF else torch.float64).to(torch.float64)


def quantised_weight(hf: HFModel, module: str) -> QuantisedWeight | None:
    """Return where a module's weight lies in the quantised checkpoint; None if it is not quantised."""
    source = hf.quantised_source
    return None if source is None else source.open().weights.get(f"{module}.weight")


def input_roundings(hf: HFModel, weight: QuantisedWeight, width: int, dtype: torch.dtype) -> Iterator[InputRounding]:
    """Yield the ways to quantise the inputs of a product as its checkpoint declares, in the engine's dtype."""
    scheme = weight.scheme.inputs
    if scheme is None or scheme.dtype not in ("int8", "float8_e4m3fn") or width % (scheme.group or 1):
        return
    scheme = by_rows(scheme)
    source = hf.quantised_source
    static = source.open().input_scale(weight) if scheme.is_static and source is not None else None
    if scheme.is_static and (static is None or static.numel() != 1):
        return
    yield from ways_to_round(scheme, None if static is None else float(static), dtype)


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


def _as_declared(subject: SuspectRows) -> Iterator[Rounding]:
    if len(subject.inputs) != 1:
        return
    own = quantised_weight(subject.hf, subject.operation.module)
    if own is None:
        return
    weight, bias = weight_and_bias(subject)
    weights = dict(_weights(subject, own)) if subject.dtype in HALF else {}
    weights = {name: each.to(weight.device) for name, each in weights.items()}
    for name, each in weights.items():
        yield Rounding(name=name, model=MODEL, expected=partial(product, subject.inputs[0].flatten(1), each, bias))
    weights[""] = weight
    x = subject.inputs[0].flatten(1).to(torch.float32)
    for way in input_roundings(subject.hf, own, x.shape[1], subject.dtype):
        for more, each in weights.items():
            used = way.dtype if way.dtype in HALF else torch.float64
            expected = partial(_product, subject, way, x, each, bias, used)
            name = DECLARED_INPUTS.format(way.scheme) + (f"; {more}" if more else "")
            yield Rounding(name=name, model=MODEL, expected=expected)


def _weights(subject: SuspectRows, weight: QuantisedWeight) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights [O, I] float64 that engines in 16 bits make of the codes, besides the rounded exact one."""
    dtype, codes = subject.dtype, _codes(subject.hf, weight)
    exact = codes.dequantised()
    yield EXACT_WEIGHT.format(dtype_name(dtype)), exact.to(torch.float64)
    scale = codes.scale.to(dtype).to(torch.float32)
    if not torch.equal(scale, codes.scale):
        rounded = replace(codes, scale=scale).dequantised().to(dtype)
        yield ROUNDED_SCALES.format(dtype_name(dtype)), rounded.to(torch.float64)
    for first in HALF:
        if first != dtype and torch.equal(codes.scale.to(first).to(torch.float32), codes.scale):
            yield ROUNDED_FIRST.format(dtype_name(first)), exact.to(first).to(dtype).to(torch.float64)


def _product(
    subject: SuspectRows,
    way: InputRounding,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    return product_of_integers(subject, *way.steps(x), weight, bias, dtype)


def _codes(hf: HFModel, weight: QuantisedWeight) -> Codes:
    source = hf.quantised_source
    assert source is not None
    return source.open().codes(weight.name)


CONVENTIONS = (
    Convention(
        name="inputs of a product quantised as a quantised checkpoint declares, or its weights not rounded",
        kinds=(Kind.LINEAR,),
        roundings=_as_declared,
    ),
)
