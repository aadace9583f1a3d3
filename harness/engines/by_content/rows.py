"""Rows of an engine's tensors: which dimension counts the tokens of a step."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_MOST_PADDING = 8
"""Rows that an engine adds to a small step, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Where a tensor has one row for each token; what is after the last row is padding."""

    dim: int
    parts: int = 1
    """Rows of the dimension for each token: heads, where these are one dimension with the tokens."""

    def rows(self, tensor: torch.Tensor, num_rows: int) -> torch.Tensor | None:
        """Return [num_rows, any], a copy or a view; None if the tensor has less."""
        if tensor.dim() <= self.dim or tensor.shape[self.dim] < num_rows * self.parts:
            return None
        first = tensor.movedim(self.dim, 0)
        if self.parts > 1:
            if len(first) % self.parts:
                return None
            first = first.reshape(len(first) // self.parts, -1)
        return first[:num_rows].reshape(num_rows, -1)


def layouts_with_rows(tensor: torch.Tensor, num_rows: int) -> Iterator[tuple[RowLayout, torch.Tensor]]:
    """Yield the ways in which a tensor may have a row for each token of a step, and the rows, [num_rows, any]."""
    for layout in _layouts(tensor.shape, num_rows):
        rows = layout.rows(tensor, num_rows)
        if rows is not None and rows.shape[1]:
            yield layout, rows


def _layouts(shape: torch.Size, num_rows: int) -> Iterator[RowLayout]:
    for dim, size in enumerate(shape):
        if num_rows <= size <= num_rows + _MOST_PADDING:
            yield RowLayout(dim=dim)
    if len(shape) >= 2 and shape[0] > num_rows + _MOST_PADDING:
        for padding in (0, 1):
            parts, rest = divmod(shape[0], num_rows + padding)
            if not rest:
                yield RowLayout(dim=0, parts=parts)
