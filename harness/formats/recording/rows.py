"""Rows: (request, position) pairs that must name a token of the recording."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from harness.formats.recording.manifest import RequestInfo


class RequestLengths:
    """The number of tokens of each request, for checks of whole columns of rows: arrays, or tensors on the CPU."""

    def __init__(self, requests: "Iterable[RequestInfo]") -> None:
        counts = sorted((request.id, len(request.token_ids)) for request in requests)
        self._ids = np.array([identity for identity, _ in counts])
        self._counts = np.array([count for _, count in counts])

    def first_unknown(self, request: Any) -> int | None:
        """Return the index of the first request id that the recording does not list."""
        return _first(self._ids[self._places(request)] != np.asarray(request))

    def first_outside(self, request: Any, position: Any) -> int | None:
        """Return the index of the first row whose position is not one of its (known) request's tokens."""
        positions = np.asarray(position)
        return _first((positions < 0) | (positions >= self.of(request)))

    def of(self, request: Any) -> Any:
        """Return the number of tokens of each (known) request."""
        return self._counts[self._places(request)]

    def _places(self, request: Any) -> Any:
        return np.searchsorted(self._ids, np.asarray(request)).clip(max=len(self._ids) - 1)


def first_invalid_index(indices: Any, num_rows: int) -> int | None:
    """Return the place of the first entry that is no index into `num_rows` rows, or that repeats an earlier one."""
    values = np.asarray(indices)
    outside = _first((values < 0) | (values >= num_rows))
    if outside is not None:
        return outside
    order = np.argsort(values, kind="stable")
    repeats = np.diff(values[order]) == 0
    return int(order[1:][repeats].min()) if repeats.any() else None


def _first(mask: Any) -> int | None:
    return int(mask.argmax()) if mask.any() else None
