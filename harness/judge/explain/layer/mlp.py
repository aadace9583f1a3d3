"""Ways to get the activation wrong: act(gate) * up, or act(x) alone."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.formats import HALF_DTYPES, name_of
from harness.judge.explain.core.hypothesis import Hypothesis, hypotheses
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


def other_activation(failure: Failure) -> Iterator[Hypothesis]:
    """Another function, or none, or the factors of the product used otherwise, or a 16-bit dtype."""
    act = activation_of(failure.hf, failure.operation)
    factors = _gate_and_up(failure, act)
    if factors is None:
        return
    gate, up = factors
    own, factor = act(gate), 1 if up is None else up
    if up is not None:
        yield Hypothesis(cause="gate and up are swapped: the activation is applied to up", output=act(up) * gate)
    for name, function in _ACTIVATIONS.items():
        if torch.equal(function(gate), own):
            continue
        yield Hypothesis(cause=f"the activation is {name}", output=function(gate) * factor)
        if up is not None:
            yield Hypothesis(cause=f"the activation is {name}, with gate and up swapped", output=function(up) * gate)
    yield Hypothesis(cause="no activation is applied", output=gate * factor)
    if up is not None:
        yield from hypotheses(
            {
                "the product with up is missing": own,
                "the gate is missing": up,
                "act(gate) and up are added instead of multiplied": own + up,
                "the activation is applied to the product": act(gate * up),
            }
        )
    for dtype in HALF_DTYPES:
        output = act(gate.to(dtype)).to(torch.float64) * factor
        yield Hypothesis(cause=f"the activation is computed in {name_of(dtype)}", output=output)


def _gate_and_up(failure: Failure, act: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return gate and up, [R, W] each; None where HF computes something else of them than act(gate) * up."""
    gate, up = factors_of(failure.operation, failure.inputs)
    for first, second in ((gate, up), (up, gate)):
        if (
            first is not None
            and act is not None
            and failure.is_expected(act(first) * (1 if second is None else second))
        ):
            return first, second
    return None


EXPLANATIONS = (other_activation,)
