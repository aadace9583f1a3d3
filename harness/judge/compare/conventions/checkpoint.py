"""Products of a quantised checkpoint: inputs quantised as it declares, weights that are not rounded after dequantising.

A checkpoint such as W8A8 says how the inputs of each product are quantised. An engine may do that, or multiply the
dequantised weight with the inputs as they are: both are right, and what it does otherwise is neither.

`R` rows, `I` inputs, `O` outputs.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from harness.formats.checkpoint.quantised.checkpoint import QuantisedWeight
from harness.formats.taps import Kind
from harness.judge.compare.conventions.entry import HALF, Convention, Rounding, SuspectRows, dtype_name
from harness.judge.compare.conventions.linear import (
    ADDED_AFTER,
    MODEL,
    product,
    product_then_bias,
    weight_and_bias,
)
from harness.judge.compare.conventions.quantised import product_of_integers
from harness.oracle.quantised_inputs import input_roundings, quantised_weight

EXACT_WEIGHT = "the dequantised weight not rounded to {}"
ROUNDED_SCALES = "the scales of the weight rounded to {}"
ROUNDED_FIRST = "the weight dequantised in {}, the dtype of its scales"
DECLARED_INPUTS = "inputs quantised to {}, as the checkpoint says"


def _as_declared(subject: SuspectRows) -> Iterator[Rounding]:
    if len(subject.inputs) != 1:
        return
    own = quantised_weight(subject.hf, subject.operation.module)
    if own is None:
        return
    weight, bias = weight_and_bias(subject)
    weights = {name: each.to(weight.device) for name, each in _weights(subject, own)}
    given, dtype = subject.inputs[0].flatten(1), subject.dtype
    for name, each in weights.items():
        yield Rounding(name=name, model=MODEL, expected=partial(product, given, each, bias))
        if bias is not None and dtype in HALF:
            after = partial(product_then_bias, given, each, bias, dtype)
            yield Rounding(name=f"{name}; {ADDED_AFTER}", model=MODEL, expected=after)
    weights[""] = weight
    x = given.to(torch.float32)
    for way in input_roundings(subject.hf, own, x.shape[1], subject.dtype):
        used = way.dtype if way.dtype in HALF else torch.float64
        for more, each in weights.items():
            expected = partial(product_of_integers, subject, *way.steps(x), each, bias, used)
            name = DECLARED_INPUTS.format(way.scheme) + (f"; {more}" if more else "")
            yield Rounding(name=name, model=MODEL, expected=expected)


def _weights(subject: SuspectRows, weight: QuantisedWeight) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights [O, I] float64 that engines make of the codes, besides the exact one, rounded in 16 bits."""
    dtype, source = subject.dtype, subject.hf.quantised_source
    assert source is not None
    codes = source.open().codes(weight.name)
    exact = codes.dequantised()
    if dtype in HALF:
        yield EXACT_WEIGHT.format(dtype_name(dtype)), exact.to(torch.float64)
    scale = codes.scale.to(dtype).to(torch.float32)
    if not torch.equal(scale, codes.scale):
        rounded = replace(codes, scale=scale).dequantised().to(dtype)
        yield ROUNDED_SCALES.format(dtype_name(dtype)), rounded.to(torch.float64)
    for first in HALF:
        if first != dtype and torch.equal(codes.scale.to(first).to(torch.float32), codes.scale):
            yield ROUNDED_FIRST.format(dtype_name(first)), exact.to(first).to(dtype).to(torch.float64)


CONVENTIONS = (
    Convention(
        name="inputs of a product quantised as a quantised checkpoint declares, or its weights not rounded",
        kinds=(Kind.LINEAR,),
        roundings=_as_declared,
    ),
)
