"""Ways to get the weights of the chosen experts wrong.

`R` rows, `E` experts, `C` chosen ones of a row.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from harness.formats.taps import Kind
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.formats import rounded
from harness.judge.explain.core.hypothesis import Hypothesis

_SAME = 1e-5
"""Relative distance within which a form of the weights is the model's own."""
_FACTORS = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
"""Names under which HF's families keep the factor of a router's weights."""
Score = Callable[[torch.Tensor], torch.Tensor]
SCORES: Mapping[str, Score] = {
    "a softmax over all experts": lambda logits: logits.softmax(dim=-1),
    "a sigmoid": torch.sigmoid,
    "the router's scores as they are": lambda logits: logits,
    "a softmax of the softmax over all experts": lambda logits: logits.softmax(dim=-1).softmax(dim=-1),
}


@dataclass(frozen=True, kw_only=True)
class _Form:
    """A way to make the weights of the chosen experts from the router's scores."""

    score: str
    is_normalised: bool
    factor: float
    weights: torch.Tensor
    """[R, C] float64."""


def other_routing_weights(failure: Failure) -> Iterator[Hypothesis]:
    """The weights are made in another way than the model's: not normalised, or once too often, by other scores."""
    logits, chosen = logits_of(failure), _chosen(failure)
    if logits is None or chosen is None:
        return
    forms = list(_forms(failure, logits, chosen))
    own = next((form for form in forms if failure.is_expected(form.weights)), None)
    if own is None:
        return
    for form in forms:
        if form is not own and not _is_same(form.weights, own.weights):
            yield Hypothesis(cause=_difference(form, own), output=form.weights)
    yield from _used_otherwise(failure, own, logits, chosen)


def _forms(failure: Failure, logits: torch.Tensor, chosen: torch.Tensor) -> Iterator[_Form]:
    factor = _factor(failure)
    for name, score in SCORES.items():
        picked = score(logits).gather(1, chosen)
        for is_normalised in (False, True):
            weights = picked / picked.sum(dim=1, keepdim=True) if is_normalised else picked
            for fromkey in dict.fromkeys((factor, 1.0, factor * factor)):
                yield _Form(score=name, is_normalised=is_normalised, factor=fromkey, weights=weights * fromkey)


def _difference(form: _Form, own: _Form) -> str:
    """Say how a form of the weights differs from the model's own."""
    parts = []
    if form.score != own.score:
        parts.append(f"the weights are made by {form.score}, instead of {own.score}")
    if form.is_normalised and not own.is_normalised:
        parts.append("the weights are normalised to a sum of one, as by a softmax over the chosen experts alone")
    if own.is_normalised and not form.is_normalised:
        parts.append("the weights are not normalised to a sum of one")
    if form.factor != own.factor:
        parts.append(f"the routed scaling factor is {form.factor:.4g} instead of {own.factor:.4g}")
    return ", and ".join(parts)


def _used_otherwise(failure: Failure, own: _Form, logits: torch.Tensor, chosen: torch.Tensor) -> Iterator[Hypothesis]:
    weights, count = own.weights, chosen.shape[1]
    again = weights / weights.sum(dim=1, keepdim=True)
    tried = {
        "the weights are all one: the router's are not used": torch.ones_like(weights),
        "the weights are all equal: the router's are not used": torch.full_like(weights, own.factor / count),
        "the weights are in another order than the experts": weights.flip(1),
        "a softmax is applied to the weights once more": weights.softmax(dim=1),
        "the weights are squared: applied twice": weights.square(),
    }
    if own.factor != 1:
        tried["the weights are normalised to a sum of one after the routed scaling factor"] = again
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        coarse = rounded(SCORES[own.score](rounded(logits, dtype)), dtype).gather(1, chosen)
        coarse = coarse / coarse.sum(dim=1, keepdim=True) if own.is_normalised else coarse
        tried[f"the weights are computed in {name}"] = coarse * own.factor
    bias = bias_of(failure)
    if bias is not None:
        corrected = (SCORES[own.score](logits) + bias).gather(1, chosen)
        corrected = corrected / corrected.sum(dim=1, keepdim=True) if own.is_normalised else corrected
        tried["the router's bias, which is for the choice alone, is in the weights, too"] = corrected * own.factor
    for cause, output in tried.items():
        if not _is_same(output, own.weights):
            yield Hypothesis(cause=cause, output=output)


def _chosen(failure: Failure) -> torch.Tensor | None:
    """Return the experts [R, C] that the weights are those of; None if the operation makes no weights."""
    own = failure.operation
    for operation in reversed(failure.graph.of_layer(own.layer)):
        if operation.kind is Kind.CHOICE and operation.module == own.module:
            chosen = failure.tap(operation.tap)
            if chosen is not None and chosen.shape == failure.expected.shape:
                return chosen.to(torch.int64)
    return None


def logits_of(failure: Failure) -> torch.Tensor | None:
    """Return the router's product [R, E] at the rows; None if it was not recorded."""
    own = failure.operation
    of_module = [item.tap for item in failure.graph.of_layer(own.layer) if item.module == own.module]
    for tap in (*own.inputs, *of_module):
        if failure.graph[tap].kind is Kind.LINEAR:
            return failure.tap(tap)
    return None


def bias_of(failure: Failure) -> torch.Tensor | None:
    """Return what a router adds to its scores for the choice alone, [E] float64; None if it adds nothing."""
    parent: Any = failure.hf.module(failure.operation.module.rpartition(".")[0])
    tensor: torch.Tensor
    for holder in (failure.module, parent):
        for name, tensor in (*holder.named_parameters(recurse=False), *holder.named_buffers(recurse=False)):
            if "bias" in name and name != "bias" and tensor.dim() == 1:
                return tensor.detach().to("cpu", torch.float64)
    return None


def _factor(failure: Failure) -> float:
    """Return the factor of the weights, 1 where the model has none."""
    parent = failure.hf.module(failure.operation.module.rpartition(".")[0])
    for holder in (failure.module, parent, failure.hf.config):
        for name in _FACTORS:
            value = getattr(holder, name, None)
            if isinstance(value, int | float) and value:
                return float(value)
    return 1.0


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one - other).norm(dim=1) <= _SAME * other.norm(dim=1)).all())


EXPLANATIONS = (other_routing_weights,)
