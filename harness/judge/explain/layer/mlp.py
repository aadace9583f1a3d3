"""Ways to get the activation wrong: act(gate) * up, or act(x) alone."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.judge.explain.core.operations import activation_of, factors_of

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SiLU": functional.silu,
    "GELU": functional.gelu,
    "GELU (tanh)": lambda x: functional.gelu(x, approximate="tanh"),
    "quick GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "ReLU": functional.relu,
    "squared ReLU": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def _gate_and_up(failure: Failure) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return gate and up, [R, W] each; None where HF computes something else of them than act(gate) * up."""
    gate, up = factors_of(failure.operation, failure.inputs)
    for first, second in ((gate, up), (up, gate)):
        if first is None or _act(failure) is None:
            continue
        given = _act(failure)(first) if second is None else _act(failure)(first) * second
        if failure.is_expected(given):
            return first, second
    return None


def gate_and_up_swapped(failure: Failure) -> Iterator[Hypothesis]:
    """The activation is applied to the other half."""
    factors = _gate_and_up(failure)
    gate, up = (None, None) if factors is None else factors
    if gate is None or up is None:
        return
    yield Hypothesis(cause="gate and up are swapped: the activation is applied to up", output=_act(failure)(up) * gate)


def other_activation(failure: Failure) -> Iterator[Hypothesis]:
    """Another activation function, or none."""
    factors = _gate_and_up(failure)
    if factors is None:
        return
    gate, up = factors
    own, factor = _act(failure)(gate), 1 if up is None else up
    for name, function in _ACTIVATIONS.items():
        if torch.equal(function(gate), own):
            continue
        yield Hypothesis(cause=f"the activation is {name}", output=function(gate) * factor)
        if up is not None:
            yield Hypothesis(cause=f"the activation is {name}, with gate and up swapped", output=function(up) * gate)
    yield Hypothesis(cause="no activation is applied", output=gate * factor)


def factor_missing(failure: Failure) -> Iterator[Hypothesis]:
    """One of the two factors is left out."""
    factors = _gate_and_up(failure)
    gate, up = (None, None) if factors is None else factors
    if gate is None or up is None:
        return
    yield Hypothesis(cause="the product with up is missing", output=_act(failure)(gate))
    yield Hypothesis(cause="the gate is missing", output=up)


def added_instead(failure: Failure) -> Iterator[Hypothesis]:
    """The two factors are added."""
    factors = _gate_and_up(failure)
    gate, up = (None, None) if factors is None else factors
    if gate is None or up is None:
        return
    yield Hypothesis(cause="act(gate) and up are added instead of multiplied", output=_act(failure)(gate) + up)


def activation_of_product(failure: Failure) -> Iterator[Hypothesis]:
    """The activation comes after the product."""
    factors = _gate_and_up(failure)
    gate, up = (None, None) if factors is None else factors
    if gate is None or up is None:
        return
    yield Hypothesis(cause="the activation is applied to the product", output=_act(failure)(gate * up))


def coarse_activation(failure: Failure) -> Iterator[Hypothesis]:
    """The activation is computed in a 16-bit dtype."""
    factors = _gate_and_up(failure)
    if factors is None:
        return
    gate, up = factors
    for dtype in (torch.bfloat16, torch.float16):
        activated = _act(failure)(gate.to(dtype)).to(torch.float64)
        output = activated if up is None else activated * up
        yield Hypothesis(cause=f"the activation is computed in {str(dtype).removeprefix('torch.')}", output=output)


def _act(failure: Failure) -> Any:
    return activation_of(failure.hf, failure.operation)


EXPLANATIONS = (
    gate_and_up_swapped,
    other_activation,
    factor_missing,
    added_instead,
    activation_of_product,
    coarse_activation,
)
