"""Tensors of the ranks of a tensor-parallel engine as what they are together: side by side, or added up."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from harness.formats.tensors import NamedTensor

_RANK = re.compile(r"(?i)(?<![a-z])((?:tp|rank)[_=-]?)(\d+)")
_PROCESS = re.compile(r"(?i)(?<![a-z])(pid|proc)[_=-]?\d+")


def together(tensors: Sequence[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield what the tensors of ranks are together, where names differ in the numbers of ranks and processes alone.

    Columns of a product that is split by its outputs lie side by side, in the order of the ranks; products that are
    split by their inputs are added up, in float32. Tensors that are the same on all ranks are left as they are.
    """
    groups: dict[str, dict[tuple[int, ...], NamedTensor]] = defaultdict(dict)
    for tensor in tensors:
        ranks = tuple(int(number) for _word, number in _RANK.findall(tensor.name))
        if ranks:
            name = _PROCESS.sub(r"\1*", _RANK.sub(r"\1*", tensor.name))
            groups[name].setdefault(ranks, tensor)
    for name, group in groups.items():
        parts = [group[ranks].tensor for ranks in sorted(group)]
        first = parts[0]
        if len(parts) < 2 or not first.dim() or any(part.dtype != first.dtype for part in parts):
            continue
        if all(part.shape[:-1] == first.shape[:-1] for part in parts) and not _are_equal(parts):
            yield NamedTensor(f"{name}, {len(parts)} ranks side by side", torch.cat(parts, dim=-1))
            if all(part.shape == first.shape for part in parts):
                added = sum(part.float() for part in parts)
                assert isinstance(added, torch.Tensor)
                yield NamedTensor(f"{name}, {len(parts)} ranks added up", added.to(first.dtype))


def _are_equal(parts: Sequence[torch.Tensor]) -> bool:
    return all(part.shape == parts[0].shape and torch.equal(part, parts[0]) for part in parts[1:])
