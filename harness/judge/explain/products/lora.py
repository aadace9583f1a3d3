"""Ways to get an adapter wrong, where the product is W x + s B (A x): left out, scaled otherwise, the wrong way round.

`R` rows, `O` outputs.
"""

import math
from collections.abc import Iterator

import torch

from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

_LEAST_ROWS, _MAX_MATCHED = 2, 4096
"""Rows from which outputs are told apart, and outputs among which they are looked for."""
_SAME_SCALE = 1e-2
"""Distance up to which a fitted scale is one that has a name."""


def adapter_left_out(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The adapter is not applied; the adapter is applied twice."""
    update = _update(wrong)
    if update is not None:
        yield Hypothesis(cause="the adapter is not applied", output=wrong.expected - update)
        yield Hypothesis(cause="the adapter is applied twice", output=wrong.expected + update)


def adapter_scaled(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The adapter's scale is alpha, not divided by the rank; alpha / sqrt(rank); *value* times what it should be."""
    update = _update(wrong)
    if update is None or not bool(update.any()):
        return
    base, rank = wrong.expected - update, len(wrong.module.lora_a)
    for factor, what in ((rank, "alpha, not divided by the rank"), (math.sqrt(rank), "alpha / sqrt(rank)")):
        yield Hypothesis(cause=f"the adapter's scale is {what}", output=base + factor * update)
    factor = wrong.factor_of(update, base)
    if min(abs(factor - named) for named in (0, 2, rank, math.sqrt(rank))) > _SAME_SCALE:
        cause = f"the adapter's scale is {factor:.4g} times what it should be"
        yield Hypothesis(cause=cause, output=base + factor * update, num_fitted=1)


def adapter_transposed(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """A and B are swapped, which only a square layer lets through: the update is the transposed one.

    Causes: A and B of the adapter are swapped, or their product is transposed.
    """
    factors = _factors(wrong)
    if factors is None:
        return
    a, b = factors
    if a.shape[1] == b.shape[0]:
        swapped = _applied(wrong, b.T, a.T)
        cause = "A and B of the adapter are swapped, or their product is transposed"
        yield Hypothesis(cause=cause, output=wrong.expected - _applied(wrong, a, b) + swapped)


def adapter_of_another(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The rows were given another of the adapters that the engine serves.

    Causes: the adapter is another one: *folder*, of those given as `--lora`.
    """
    update = _update(wrong)
    if update is None:
        return
    x = wrong.inputs[0].flatten(1)
    for name, adapter in wrong.module.others.items():
        theirs = x @ adapter.a.to(x).T @ adapter.b.to(x).T * adapter.scaling
        yield Hypothesis(cause=f"the adapter is another one: {name}", output=wrong.expected - update + theirs)


def outputs_of_adapter_in_another_order(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The rows of B are in another order than the weight's: those of heads that were not reordered with it.

    Causes: the rows of the adapter's B are in another order.
    """
    update = _update(wrong)
    if update is None or len(update) < _LEAST_ROWS or update.shape[1] > _MAX_MATCHED:
        return
    base = wrong.expected - update
    # Each output's own update is the column that is nearest to what was added to it.
    source = torch.cdist((wrong.actual - base).T.contiguous(), update.T.contiguous()).argmin(dim=1)
    if not torch.equal(source, torch.arange(len(source))):
        yield Hypothesis(cause="the rows of the adapter's B are in another order", output=base + update[:, source])


def _update(wrong: WrongOperation) -> torch.Tensor | None:
    """Return what the adapter adds, [R, O]; None if there is none."""
    factors = _factors(wrong)
    return None if factors is None else _applied(wrong, *factors)


def _applied(wrong: WrongOperation, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return wrong.inputs[0].flatten(1) @ a.T @ b.T * float(wrong.module.scaling)


def _factors(wrong: WrongOperation) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return A [rank, I] and B [O, rank]; None if there is no adapter."""
    a, b = (wrong.weight(wrong.operation.tap, name) for name in ("lora_a", "lora_b"))
    return None if a is None or b is None else (a, b)
