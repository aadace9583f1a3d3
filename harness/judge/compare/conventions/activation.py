"""Conventions of activations.

`R` rows, `W` elements of a row.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import silu

from harness.base.metrics import rounding_unit
from harness.formats.taps import KINDS, ErrorModel, Kind
from harness.judge.compare.conventions.entry import Convention, Rounding, SuspectRows

ABSOLUTE_SIGMOID = "the sigmoid is as exact as one in float32, not as its own value"
_ERROR = 2.0**-23
"""Of such a sigmoid, absolute: ONNX Runtime's is off by up to 1.1 times as much, and by a third of it on average."""
_SAME = 1e-6
_MODEL = KINDS[Kind.ACTIVATION].error_model or ErrorModel(roundings=2)


def _absolute_sigmoid(subject: SuspectRows) -> Iterator[Rounding]:
    """Compute the sigmoid as one half and a fraction, as ONNX Runtime does: what is near zero loses its digits."""
    if subject.dtype != torch.float32 or len(subject.inputs) != 2:
        return
    one, other = (each.flatten(1).to("cpu", torch.float64) for each in subject.inputs)
    expected = subject.expected.flatten(1).to("cpu", torch.float64)
    norm = expected.norm(dim=1)
    for gate, up in ((one, other), (other, one)):
        if one.shape == expected.shape == other.shape and bool(
            ((silu(gate) * up - expected).norm(dim=1) <= _SAME * norm).all()
        ):
            allowance = _ERROR * (gate * up).norm(dim=1) / (norm * rounding_unit(torch.float32))
            yield Rounding(
                name=ABSOLUTE_SIGMOID,
                model=_MODEL,
                expected=lambda: subject.expected.double(),
                allowance=allowance.nan_to_num(nan=0.0, posinf=0.0),
            )
            return


CONVENTIONS = (
    Convention(name="a sigmoid with an absolute error", kinds=(Kind.ACTIVATION,), roundings=_absolute_sigmoid),
)
