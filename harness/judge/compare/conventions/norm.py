"""Conventions of norms."""

from collections.abc import Iterator

import torch

from harness.formats.taps import KINDS, ErrorModel, Kind
from harness.judge.compare.conventions.entry import HALF, Convention, Rounding, SuspectRows

UNROUNDED_SUM = "the sum that is normalised is not rounded before"
_MODEL = KINDS[Kind.NORM].error_model or ErrorModel(roundings=2)


def _unrounded_sum(subject: SuspectRows) -> Iterator[Rounding]:
    """Add the residual and normalise the sum in float32, as fused kernels do; it is rounded only for the stream."""
    graph, (source, *_) = subject.hf.graph, subject.operation.inputs or ("",)
    if subject.dtype not in HALF or source not in graph or graph[source].kind is not Kind.ADD:
        return
    addends = [subject.recorded(tap) for tap in graph[source].inputs]
    known = [each.flatten(1).to(subject.expected.dtype) for each in addends if each is not None]
    if len(known) < len(addends) or not known:
        return
    yield Rounding(name=UNROUNDED_SUM, model=_MODEL, expected=lambda: _normalised(subject, torch.stack(known).sum(0)))


def _normalised(subject: SuspectRows, x: torch.Tensor) -> torch.Tensor:
    module = subject.hf.module(subject.operation.module)
    result: torch.Tensor = module.forward(x.view_as(subject.inputs[0]))  # without its hooks: the model is being run
    return result.flatten(1).to(torch.float64)


CONVENTIONS = (Convention(name="norms of a sum that is kept in float32", kinds=(Kind.NORM,), roundings=_unrounded_sum),)
