"""The positions at which products and attention are judged, where not all are, and what that may leave unseen."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch

from harness.judge.compare.align import Rows
from harness.judge.compare.propagated import Propagation
from harness.judge.compare.sequences import NOWHERE, RowSequence

CONFIDENCE = 0.95
"""Probability of a wrong row in the sample, for as many wrong rows as are said to be found."""
_SHARE_STANDING_OUT = 4
"""One row that stands out against the golden for so many that are drawn."""
_REQUEST = 1 << 32
"""Above every position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSample:
    """A sample of the positions of each request.

    Of every stretch of so many positions one is drawn at random. Besides, both borders of what a step computed are in
    it, and the rows that stand out most against the golden.
    """

    num_rows: int
    """Positions that are drawn."""
    seed: int = 0
    standing_out: Rows | None = None
    """The rows that differ most from the golden, for their tap, first; None if nothing was compared with it."""

    def positions(self, group: Sequence[RowSequence], index: int) -> torch.Tensor | None:
        """Return the positions, [n] int64 and ascending, for requests that run side by side; None for all.

        Args:
            group: their sequences.
            index: number of the group: each draws its own.
        """
        length = max(map(len, group))
        if length <= self.num_rows:
            return None
        generator = Random(f"{self.seed}:{index}")
        edges = pairwise(at * length // self.num_rows for at in range(self.num_rows + 1))
        drawn = [generator.randrange(begin, end) for begin, end in edges]
        borders = sorted({position for sequence in group for position in _borders(sequence)})
        found = {*drawn, *spread(borders, self.num_rows), *borders[-1:], *self._standing_out(group)}
        return None if len(found) == length else torch.tensor(sorted(found))

    def _standing_out(self, group: Sequence[RowSequence]) -> list[int]:
        if self.standing_out is None:
            return []
        own = torch.isin(self.standing_out.request, torch.tensor([sequence.request.id for sequence in group]))
        position = self.standing_out.position[own]
        inside = position < max(map(len, group))
        return position[inside][: max(1, self.num_rows // _SHARE_STANDING_OUT)].tolist()

    def least_found(self, length: int) -> int:
        """Return from how many wrong rows of one operation on, of so many rows, one is drawn as likely as `CONFIDENCE`.

        Of k wrong rows among the s of a stretch none is drawn with 1 - k / s. That of all stretches is largest where
        each has as many as every other, and all are as long as the longest.
        """
        stretch = math.ceil(length / self.num_rows)
        return next(k for k in range(1, stretch * self.num_rows + 1) if self._missed(k, stretch) <= 1 - CONFIDENCE)

    def _missed(self, num_wrong: int, stretch: int) -> float:
        """Return the probability that none of some wrong rows is drawn, wherever they are."""
        each, more = divmod(num_wrong, self.num_rows)
        return float((1 - (each + 1) / stretch) ** more * (1 - each / stretch) ** (self.num_rows - more))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """How many rows a sample left out."""

    judged: int = 0
    """Rows at which products and attention were judged."""
    left_out: int = 0
    """Rows at which they were not."""
    least_found: int | None = None
    """See `RowSample.least_found`: the most of all groups; None if nothing was left out."""


def _borders(sequence: RowSequence) -> Iterator[int]:
    """Yield the first and the last position that each step computed."""
    own = torch.where(sequence.is_own, sequence.step, -1)
    changes = own.diff(prepend=own.new_tensor([-2]), append=own.new_tensor([-2])) != 0
    is_border = (changes[:-1] | changes[1:]) & sequence.is_own
    yield from is_border.nonzero()[:, 0].tolist()


def spread(items: Sequence[int], count: int) -> list[int]:
    """Return at most so many of the items, the first among them, spread over all."""
    if len(items) <= count:
        return list(items)
    return [items[at * len(items) // count] for at in range(count)]


def rows_standing_out(propagation: Propagation) -> Rows | None:
    """Return all rows that were compared with the golden: first the one that is farthest off for its tap.

    Errors are taken over their tap's median: one row that is wrong stands out in its own tap and in those after it.
    """
    keys, sizes = [], []
    for errors in propagation.errors.values():
        finite = errors.ratio[errors.ratio.isfinite()]
        typical = max(float(finite.median()) if len(finite) else 0.0, torch.finfo(torch.float64).tiny)
        keys.append(errors.rows.request * _REQUEST + errors.rows.position)
        sizes.append((errors.ratio / typical).nan_to_num(nan=math.inf, posinf=math.inf))
    if not keys:
        return None
    rows, which = torch.cat(keys).unique(return_inverse=True)
    largest = torch.zeros(len(rows), dtype=torch.float64).scatter_reduce(0, which, torch.cat(sizes), "amax")
    rows = rows[largest.argsort(descending=True, stable=True)]
    return Rows(request=rows // _REQUEST, position=rows % _REQUEST, step=torch.full_like(rows, NOWHERE))
