"""Ways to get an adapter wrong, where the product is W x + s B (A x): left out, scaled otherwise, in another order."""

import math
from collections.abc import Iterator

import torch

from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation, hypotheses

_LEAST_ROWS, _MAX_MATCHED = 2, 4096
"""Rows from which outputs are told apart, and outputs among which they are looked for."""
_SAME_SCALE = 1e-2
"""Distance up to which a fitted scale is one that has a name."""


def wrong_adapter(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The adapter is another, is scaled otherwise, or does not fit the weight that it is added to.

    A and B swapped pass in a square layer alone. The rows of B are those of heads that were not reordered with the
    weight's.

    Causes: the adapter is not applied; is applied twice; the adapter's scale is alpha, not divided by the rank; alpha /
    sqrt(rank); *value* times what it should be; A and B of the adapter are swapped, or their product is transposed; the
    adapter is another one: *folder*, of those given as `--lora`; the rows of the adapter's B are in another order.
    """
    a, b = (wrong.weight(wrong.operation.tap, name) for name in ("lora_a", "lora_b"))
    if a is None or b is None:
        return
    x, scaling, rank = wrong.inputs[0].flatten(1), float(wrong.module.scaling), len(a)
    update = scaling * (x @ a.T @ b.T)
    base = wrong.expected - update
    tried = {"the adapter is not applied": base, "the adapter is applied twice": wrong.expected + update}
    if a.shape[1] == b.shape[0]:
        swapped = "A and B of the adapter are swapped, or their product is transposed"
        tried[swapped] = base + scaling * (x @ b @ a)
    for name, adapter in wrong.module.others.items():
        theirs = x @ adapter.a.to(x).T @ adapter.b.to(x).T * adapter.scaling
        tried[f"the adapter is another one: {name}"] = base + theirs
    has_scale = bool(update.any())
    if has_scale:
        tried["the adapter's scale is alpha, not divided by the rank"] = base + rank * update
        tried["the adapter's scale is alpha / sqrt(rank)"] = base + math.sqrt(rank) * update
    if len(update) >= _LEAST_ROWS and update.shape[1] <= _MAX_MATCHED:
        # The update of each output is the column that is nearest to what was added to it.
        source = torch.cdist((wrong.actual - base).T.contiguous(), update.T.contiguous()).argmin(dim=1)
        if not torch.equal(source, torch.arange(len(source))):
            tried["the rows of the adapter's B are in another order"] = base + update[:, source]
    yield from hypotheses(tried)
    factor = wrong.factor_of(update, base) if has_scale else 0.0
    if min(abs(factor - named) for named in (0, 2, rank, math.sqrt(rank))) > _SAME_SCALE:
        cause = f"the adapter's scale is {factor:.4g} times what it should be"
        yield Hypothesis(cause=cause, output=base + factor * update, num_fitted=1)
