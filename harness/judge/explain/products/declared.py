"""A wrong product with the inputs as the engine is known to round them: declared conventions stay in force.

An engine that quantises the inputs of its products has, where a weight is wrong, the wrong product of *quantised*
inputs. Held against the inputs as they were recorded, no cause would come down to the rounding floor.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from harness.base.numerics import Numerics
from harness.formats.taps import Kind
from harness.judge.compare.conventions.linear import product, quantised_inputs, rounded_inputs
from harness.judge.explain.core.failure import Failure
from harness.oracle.declared_inputs import rounded_inputs as rounded_as_declared


def declared_failures(failure: Failure) -> Iterator[Failure]:
    """Yield the failure of a product under each order of rounding its inputs that the engine declares."""
    declared = failure.recording.manifest.numerics or Numerics()
    is_adapted = failure.operation.kind is Kind.OTHER and hasattr(failure.module, "lora_a")
    weight = failure.weight(failure.operation.tap) if is_adapted or failure.operation.kind is Kind.LINEAR else None
    if weight is None:
        return
    bias, x = failure.weight(failure.operation.tap, "bias"), failure.inputs[0].flatten(1)
    for inputs in _declared_inputs(failure, x, declared):
        if is_adapted:  # the adapter's own products take the inputs as they are
            yield replace(failure, expected=failure.expected + (inputs - x) @ weight.T)
            continue
        yield replace(failure, inputs=[inputs], expected=product(inputs, weight, bias))


def _declared_inputs(failure: Failure, x: torch.Tensor, declared: Numerics) -> Iterator[torch.Tensor]:
    """Yield [R, I] float64 inputs as the engine's formats, or the quantised checkpoint, say that products see them."""
    if failure.dtype == torch.float32 and declared.weights:
        yield from rounded_inputs(x, declared.weights)
        yield from quantised_inputs(x, declared.weights)
    yield from rounded_as_declared(failure.hf, failure.operation.module, x, failure.dtype)
