"""The tensors of a decoder by their paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch

__all__ = ["named_tensors"]


def named_tensors(name: str, part: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a tree of layers by their paths: `layers.3.mlp.down_proj.weight`."""
    if isinstance(part, torch.Tensor):
        if part.dim():  # or it is a number of the config
            yield name, part
    elif isinstance(part, tuple):
        for index, child in enumerate(part):
            yield from named_tensors(f"{name}.{index}", child)
    elif is_dataclass(part):
        for field in fields(part):
            plain = re.sub("_[A-Z]+$", "", field.name)  # weight_OI, whose shape is not part of its name
            yield from named_tensors(f"{name}.{plain}" if name else plain, getattr(part, field.name))
