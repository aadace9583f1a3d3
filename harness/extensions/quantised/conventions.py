"""Products of a quantised checkpoint: inputs quantised as it declares, weights that are not rounded after dequantising.

A checkpoint such as W8A8 says how the inputs of each product are quantised. An engine may do that, or multiply the
dequantised weight with the inputs as they are. Both are right; anything else is an error.

`R` rows, `I` inputs, `O` outputs.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from harness.extensions.quantised.checkpoint import QuantisedCheckpoint, QuantisedWeight
from harness.extensions.quantised.config import InputScheme
from harness.extensions.quantised.folder import open_source
from harness.extensions.quantised.inputs import by_rows, ways_to_round
from harness.formats.taps import Kind, Operation
from harness.judge.compare.conventions.entry import HALF, Convention, Rounding, SuspectRows, dtype_name
from harness.judge.compare.conventions.experts import experts_with
from harness.judge.compare.conventions.linear import (
    ADDED_AFTER,
    MODEL,
    product,
    product_of_integers,
    product_then_bias,
    weight_and_bias,
)
from harness.oracle.experts import num_experts, reads_slots
from harness.oracle.model import HFModel


def quantised_checkpoint(hf: HFModel) -> QuantisedCheckpoint | None:
    """Return the quantised checkpoint that a model's weights come from; None of any other model."""
    source = hf.quantised_source
    return None if source is None else open_source(source)


def quantised_weight(hf: HFModel, module: str) -> QuantisedWeight | None:
    """Return where a module's weight lies in the quantised checkpoint; None if it is not quantised."""
    checkpoint = quantised_checkpoint(hf)
    return None if checkpoint is None else checkpoint.weights.get(f"{module}.weight")


EXACT_WEIGHT = "the dequantised weight not rounded to {}"
ROUNDED_SCALES = "the scales of the weight rounded to {}"
ROUNDED_FIRST = "the weight dequantised in {}, the dtype of its scales"
DECLARED_INPUTS = "inputs quantised to {}, as the checkpoint says"


def _as_declared(subject: SuspectRows) -> Iterator[Rounding]:
    if len(subject.inputs) != 1:
        return
    checkpoint = quantised_checkpoint(subject.hf)
    quantised = None if checkpoint is None else checkpoint.weights.get(f"{subject.operation.module}.weight")
    if checkpoint is None or quantised is None:
        return
    weight, bias = weight_and_bias(subject)
    weights = {name: item.to(weight.device) for name, item in _weights(subject, checkpoint, quantised)}
    inputs, dtype = subject.inputs[0].flatten(1), subject.dtype
    for name, item in weights.items():
        yield Rounding(name=name, model=MODEL, expected=partial(product, inputs, item, bias))
        if bias is not None and dtype in HALF:
            after = partial(product_then_bias, inputs, item, bias, dtype)
            yield Rounding(name=f"{name}; {ADDED_AFTER}", model=MODEL, expected=after)
    weights[""] = weight
    x = inputs.to(torch.float32)
    for way in checkpoint.input_roundings(quantised, x.shape[1], subject.dtype):
        used = way.dtype if way.dtype in HALF else torch.float64
        for more, item in weights.items():
            expected = partial(product_of_integers, subject, *way.steps(x), item, bias, used)
            name = DECLARED_INPUTS.format(way.scheme) + (f"; {more}" if more else "")
            yield Rounding(name=name, model=MODEL, expected=expected)


def _weights(
    subject: SuspectRows, checkpoint: QuantisedCheckpoint, weight: QuantisedWeight
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights [O, I] float64 that engines make of the codes, besides the exact one, rounded in 16 bits."""
    dtype = subject.dtype
    codes = checkpoint.codes(weight.name)
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


def _experts_as_declared(subject: SuspectRows) -> Iterator[Rounding]:
    scheme = input_scheme(subject.hf, subject.operation) if len(subject.inputs) == 3 else None
    if scheme is not None:
        for way in ways_to_round(by_rows(scheme), None, subject.dtype):
            yield from experts_with(subject, way.steps, way.scheme.group or 1, DECLARED_INPUTS.format(way.scheme))


def input_scheme(hf: HFModel, operation: Operation) -> InputScheme | None:
    """Return how the inputs of all experts are quantised; None where they are not, or where it is not known."""
    checkpoint = quantised_checkpoint(hf)
    if checkpoint is None or not operation.module:
        return None
    module = hf.module(operation.module)
    if num_experts(module) is None or reads_slots(module):
        return None
    weights = checkpoint.weights.values()
    schemes = {weight.scheme.inputs for weight in weights if weight.module.startswith(f"{operation.module}.")}
    scheme = next(iter(schemes)) if len(schemes) == 1 else None
    return None if scheme is None or scheme.is_static else scheme


CONVENTIONS = (
    Convention(
        name="inputs of a product quantised as a quantised checkpoint declares, or its weights not rounded",
        kinds=(Kind.LINEAR,),
        alternatives=_as_declared,
    ),
    Convention(
        name="inputs of experts quantised as a quantised checkpoint declares",
        kinds=(Kind.OTHER,),
        alternatives=_experts_as_declared,
    ),
)
