"""Conventions of activations.

`R` rows, `W` elements of a row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, silu

from harness.base.metrics import rounding_unit
from harness.formats.taps import KINDS, ErrorModel, Kind
from harness.judge.compare.conventions.entry import Convention, Rounding, SuspectRows

ABSOLUTE_SIGMOID = "the sigmoid is as exact as one in float32, not as its own value"
ABSOLUTE_NORMAL = "gelu's share of its input is as exact as one in float32, not as its own value"
_SAME = 1e-6
_MODEL = KINDS[Kind.ACTIVATION].error_model or ErrorModel(roundings=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Activation:
    """A function that gives a share of its input: x times something between 0 and 1."""

    name: str
    of: Callable[[torch.Tensor], torch.Tensor]
    error: float
    """Of the share, absolute, in float32."""


_ACTIVATIONS = (
    # ONNX Runtime's sigmoid is off by up to 1.1 times as much, and by a third of it on average.
    _Activation(name=ABSOLUTE_SIGMOID, of=silu, error=2.0**-23),
    # torch's is off by up to 0.74 times as much on a CPU with AVX-512, and by 0.2 times where it computes one element.
    _Activation(name=ABSOLUTE_NORMAL, of=gelu, error=2.0**-21),
)


def _absolute_share(subject: SuspectRows) -> Iterator[Rounding]:
    """Let the share of the input that an activation gives be off by as much wherever it is: near zero it has no digits.

    ONNX Runtime computes a sigmoid as one half and a fraction, torch gelu's share as one half and half of erf.
    """
    if subject.dtype != torch.float32:
        return
    expected = subject.expected.flatten(1).to("cpu", torch.float64)
    norm = expected.norm(dim=1)
    for gate, up in _gates(subject, expected.shape[1]):
        for activation in _ACTIVATIONS:
            if bool(((activation.of(gate) * up - expected).norm(dim=1) <= _SAME * norm).all()):
                allowance = activation.error * (gate * up).norm(dim=1) / (norm * rounding_unit(torch.float32))
                yield Rounding(
                    name=activation.name,
                    model=_MODEL,
                    expected=lambda: subject.expected.double(),
                    allowance=allowance.nan_to_num(nan=0.0, posinf=0.0),
                )
                return


def _gates(subject: SuspectRows, width: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what may be the input of the activation and what it is multiplied with, [R, W] each."""
    inputs = [each.flatten(1).to("cpu", torch.float64) for each in subject.inputs]
    if len(inputs) == 1 and inputs[0].shape[1] == width:
        yield inputs[0], torch.ones_like(inputs[0])
    if len(inputs) == 1 and inputs[0].shape[1] == 2 * width:
        inputs = list(inputs[0].chunk(2, dim=1))
    if len(inputs) == 2 and all(each.shape[1] == width for each in inputs):
        yield inputs[0], inputs[1]
        yield inputs[1], inputs[0]


CONVENTIONS = (Convention(name="a share with an absolute error", kinds=(Kind.ACTIVATION,), roundings=_absolute_share),)
