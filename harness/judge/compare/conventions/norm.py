"""Conventions of norms.

`R` rows, `W` elements of a row, `D` elements that are normalised together: a row, or a head of it.
"""

from collections.abc import Iterator

import torch

from harness.formats.taps import KINDS, ErrorModel, Kind
from harness.judge.compare.conventions.entry import HALF, Convention, Rounding, SuspectRows

UNROUNDED_SUM = "the sum that is normalised is not rounded before"
SUMMED_IN_ORDER = "the squares are summed one after the other in float32"
_MOST_SIGMAS = 5.0
"""Of the error of such a sum, which is random from row to row."""
_MODEL = KINDS[Kind.NORM].error_model or ErrorModel(roundings=2)


def _unrounded_sum(subject: SuspectRows) -> Iterator[Rounding]:
    """Add the residual and normalise the sum in float32, as fused kernels do; it is rounded only for the stream."""
    graph, (source, *_) = subject.hf.graph, subject.operation.inputs or ("",)
    if subject.dtype not in HALF or source not in graph or graph[source].kind is not Kind.ADD:
        return
    addends = [subject.recorded(tap) for tap in graph[source].inputs]
    known = [addend.flatten(1).to(subject.expected.dtype) for addend in addends if addend is not None]
    if len(known) < len(addends) or not known:
        return
    yield Rounding(name=UNROUNDED_SUM, model=_MODEL, expected=lambda: _normalised(subject, torch.stack(known).sum(0)))


def _summed_in_order(subject: SuspectRows) -> Iterator[Rounding]:
    """Sum the squares without blocks, as plain loops do (MLX, ONNX Runtime): each partial sum is rounded."""
    if subject.dtype == torch.float32 and len(subject.inputs) == 1:
        allowance = _MOST_SIGMAS * error_of_sum(subject.inputs[0])
        yield Rounding(
            name=SUMMED_IN_ORDER, model=_MODEL, expected=lambda: subject.expected.double(), allowance=allowance
        )


def error_of_sum(x: torch.Tensor) -> torch.Tensor:
    """Return [R] float64: the standard error of a norm of [R, ..., D], in roundings, if squares are summed in order.

    Each partial sum S_k is rounded by itself, to a share S_k / S of the whole; the root halves what they add up to.
    """
    partial = x.to("cpu", torch.float64).square().cumsum(dim=-1)
    shares = partial / partial[..., -1:].clamp_min(torch.finfo(torch.float64).tiny)
    return shares.square().sum(dim=-1).flatten(1).mean(dim=1).sqrt() / 2 if x.dim() > 2 else shares.norm(dim=-1) / 2


def _normalised(subject: SuspectRows, x: torch.Tensor) -> torch.Tensor:
    module = subject.hf.module(subject.operation.module)
    result: torch.Tensor = module.forward(x.view_as(subject.inputs[0]))  # without its hooks: the model is being run
    return result.flatten(1).to(torch.float64)


CONVENTIONS = (
    Convention(name="norms of a sum that is kept in float32", kinds=(Kind.NORM,), roundings=_unrounded_sum),
    Convention(name="squares of a norm summed in order", kinds=(Kind.NORM,), roundings=_summed_in_order),
)
