"""Rows: (request, position) pairs that must name a token of the recording."""

from collections.abc import Iterable

import torch

from harness.recording.manifest import RequestInfo


class TokenCounts:
    """How many tokens each request has, for checking whole columns of rows at once."""

    def __init__(self, requests: Iterable[RequestInfo]) -> None:
        counts = sorted((request.id, len(request.token_ids)) for request in requests)
        self._ids = torch.tensor([identity for identity, _ in counts])
        self._counts = torch.tensor([count for _, count in counts])

    def first_unknown(self, request: torch.Tensor) -> int | None:
        """Return the index of the first request id that the recording does not list."""
        return _first(self._ids[self._places(request)] != request)

    def first_outside(self, request: torch.Tensor, position: torch.Tensor) -> int | None:
        """Return the index of the first row whose position is not one of its (known) request's tokens."""
        return _first((position < 0) | (position >= self.of(request)))

    def of(self, request: torch.Tensor) -> torch.Tensor:
        """Return the number of tokens of each (known) request."""
        return self._counts[self._places(request)]

    def _places(self, request: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(self._ids, request.long()).clamp(max=len(self._ids) - 1)


def first_invalid_index(indices: torch.Tensor, num_rows: int) -> int | None:
    """Return the place of the first entry that is no index into `num_rows` rows, or that repeats an earlier one."""
    outside = _first((indices < 0) | (indices >= num_rows))
    if outside is not None:
        return outside
    order = torch.argsort(indices, stable=True)
    repeats = indices[order].diff() == 0
    return int(order[1:][repeats].min()) if repeats.any() else None


def _first(mask: torch.Tensor) -> int | None:
    return int(mask.to(torch.uint8).argmax()) if mask.any() else None
