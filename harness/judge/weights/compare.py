"""Tensors against tensors: how many values differ, by how much, and how much of a known update arrived."""

import hashlib
from typing import Any

import torch

from harness.judge.weights.match import Pair, lines_of, match
from harness.judge.weights.sources import TensorSource
from harness.results.weights import TensorDifference, WeightsResult


def compare_weights(first: Any, second: Any, *, before: Any = None, local_files_only: bool = True) -> WeightsResult:
    """Compare two sets of weights.

    Args:
        first: the weights that are right: a checkpoint's folder, a module, or tensors by name.
        second: the weights under test.
        before: earlier weights with the names of the first: the update is what lies between.
        local_files_only: never ask the model hub.

    Raises:
        HarnessError: BAD_OPTION, or what is wrong with a checkpoint.
    """
    one, two = (
        TensorSource.of(weights, where=where, local_files_only=local_files_only)
        for weights, where in ((first, "the first weights"), (second, "the second weights"))
    )
    old = None if before is None else TensorSource.of(before, where="before", local_files_only=local_files_only)
    pairs, only_first, only_second = match(one, two)
    _drop_tied(one, two, only_first, only_second)
    tensors, moved, total = [], 0.0, 0.0
    for pair in pairs:
        difference, dot, norm = _difference(pair, one, two, old)
        tensors.append(difference)
        moved, total = moved + dot, total + norm
    return WeightsResult(
        first=one.name,
        second=two.name,
        tensors=tuple(tensors),
        only_first=tuple(only_first),
        only_second=tuple(only_second),
        arrived=moved / total if total else None,
    )


def _drop_tied(one: TensorSource, two: TensorSource, only_first: list[str], only_second: list[str]) -> None:
    """Take a head that one side has, and the other has as its embedding, out of what has no counterpart."""
    for names, source in ((only_first, one), (only_second, two)):
        for name in [name for name in names if name.endswith("lm_head.weight")]:
            same = (other for other, shape in source.shapes.items() if other != name and shape == source.shapes[name])
            if any(torch.equal(source[other], source[name]) for other in same):
                names.remove(name)


def _difference(
    pair: Pair, one: TensorSource, two: TensorSource, old: TensorSource | None
) -> tuple[TensorDifference, float, float]:
    """Return a pair's difference, and of the known update the part that arrived, and the whole: dot products."""
    first, second = (tensor.detach().cpu() for tensor in pair.of(one, two))
    a, b = first.double(), second.double()
    gap = (a - b).abs()
    apart = a != b
    if first.dtype != second.dtype:
        eps = max(torch.finfo(item.dtype).eps for item in (first, second) if item.is_floating_point())
        apart &= gap > eps * torch.maximum(a.abs(), b.abs())
    apart |= a.isnan() != b.isnan()
    apart &= ~(a.isnan() & b.isnan())
    dot, norm = _update(pair, a, b, old)
    difference = TensorDifference(
        name=pair.whole,
        counterpart=str(pair),
        dtypes=(_name(first), _name(second)),
        digests=(_digest(first), _digest(second)),
        num_values=a.numel(),
        num_different=int(apart.sum()),
        max_abs=float(gap.nan_to_num(torch.inf).max()) if a.numel() else 0.0,
        relative=float(gap.nan_to_num(0.0).norm() / a.nan_to_num(0.0).norm().clamp(min=1e-30)),
        arrived=dot / norm if norm else None,
    )
    return difference, dot, norm


def _update(pair: Pair, a: torch.Tensor, b: torch.Tensor, old: TensorSource | None) -> tuple[float, float]:
    name = pair.whole if pair.is_expected else pair.other
    if old is None or name not in old.shapes:
        return 0.0, 0.0
    earlier = old[name].double().cpu()
    if pair.columns is not None:
        earlier = lines_of(earlier, pair.dim)
        earlier = earlier if pair.is_expected else pair.columns.of(earlier)
    if earlier.numel() != a.numel():
        return 0.0, 0.0
    earlier = earlier.reshape(a.shape)
    update = a - earlier
    return float(((b - earlier) * update).sum()), float(update.square().sum())


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_zeros(0)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
