"""Rows by content: what a row holds follows from its tokens so far, whichever request computed it.

An engine that finds a prompt's beginning in its cache, or forks a request, does not compute these rows again; they are
another request's with the same *prefix*, the tokens up to and including the row's own.
"""

from collections.abc import Sequence

import torch

from harness.formats.recording import RequestInfo
from harness.judge.compare.align import Rows


class Prefixes:
    """Numbers the distinct token prefixes of some requests, 0 and up."""

    def __init__(self, requests: Sequence[RequestInfo]) -> None:
        ordered = sorted(requests, key=lambda request: request.id)
        self._request_ids = torch.tensor([request.id for request in ordered], dtype=torch.int64)
        length = max((len(request.token_ids) for request in ordered), default=0)
        self.table = torch.full((len(ordered), length), -1, dtype=torch.int64)
        """[requests in ascending order of id, positions] int64: the number of each prefix; -1 past the end."""
        numbers: dict[tuple[int, int], int] = {}
        images = list(dict.fromkeys([None, *(request.inputs for request in ordered)]))
        for row, request in enumerate(ordered):
            parent, chain = -1 - images.index(request.inputs), []
            for token in request.token_ids:
                parent = numbers.setdefault((parent, token), len(numbers))
                chain.append(parent)
            self.table[row, : len(chain)] = torch.tensor(chain, dtype=torch.int64)
        self.count = len(numbers)

    def of(self, rows: Rows) -> torch.Tensor:
        """Return [rows] int64: the number of each row's prefix."""
        return self.table[torch.searchsorted(self._request_ids, rows.request), rows.position]

    def up_to(self, request: int, end: int) -> torch.Tensor:
        """Return [end] int64: the numbers of a request's prefixes at the positions below `end`."""
        return self.table[int(torch.searchsorted(self._request_ids, request)), :end]

    def at(self, request: int, position: int) -> int:
        """Return the number of a request's prefix up to and including a position."""
        return int(self.up_to(request, position + 1)[-1])
