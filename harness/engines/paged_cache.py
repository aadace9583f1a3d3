"""A request's keys and values in a live engine's paged cache, read through its block table.

The engine's own writer shows where the cache keeps each element.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.errors import Code, HarnessError


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The place of every element of every slot in the cache's memory."""

    places: torch.Tensor
    """[slots, elements] int64: index into the flat cache."""
    row_shape: tuple[int, ...]

    @classmethod
    def learn(
        cls,
        cache: torch.Tensor,
        write: Callable[[torch.Tensor, torch.Tensor], None],
        *,
        num_slots: int,
        row_shape: Sequence[int],
    ) -> "CacheLayout":
        """Write the number of each element, bit by bit, through the engine's writer and find it again.

        Zeros and ones are exact in any dtype, quantised ones too. The cache is put back as it was.

        Args:
            cache: keys or values of one layer, in any layout.
            write: the engine's writer: rows [slots, *row_shape] and their slots, int64 [slots].
            num_slots: slots in use from 0 on.
            row_shape: of a row, as the engine's writer takes it: (KV heads, head size).

        Raises:
            HarnessError: BAD_CACHE_LAYOUT: an element is nowhere, or in two places.
        """
        num_elements = torch.Size(row_shape).numel()
        numbers = torch.arange(1, num_slots * num_elements + 1, device=cache.device).view(num_slots, *row_shape)
        slots, before = torch.arange(num_slots, device=cache.device), cache.clone()
        written = torch.zeros(cache.numel(), dtype=torch.int64, device=cache.device)
        try:
            for bit in range(int(numbers.max()).bit_length()):
                cache.zero_()
                write((numbers >> bit & 1).to(cache.dtype if cache.is_floating_point() else torch.float32), slots)
                written |= (cache.reshape(-1) != 0).long() << bit
        finally:
            cache.copy_(before)
        places = torch.full((numbers.numel() + 1,), -1, dtype=torch.int64, device=cache.device)
        at = written.nonzero()[:, 0]
        places[written[at].clamp(max=numbers.numel())] = at
        if len(at) != numbers.numel() or bool((places[1:] < 0).any()):
            raise HarnessError(
                Code.BAD_CACHE_LAYOUT,
                "the cache does not keep each element in one place",
                where=f"a cache of shape {list(cache.shape)}",
                expected=f"{numbers.numel()} elements of {num_slots} slots",
                actual=f"{len(at)} that were written",
                hint="give `CacheLayout.learn` the engine's writer of this cache, and rows of the shape that it takes",
            )
        return cls(places[1:].view(num_slots, num_elements), tuple(row_shape))

    def read(self, cache: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """Return the rows of some slots: [len(slots), *row_shape] in the cache's dtype."""
        wanted = self.places[torch.tensor(list(slots), device=self.places.device)]
        rows: torch.Tensor = cache.reshape(-1)[wanted].unflatten(1, self.row_shape)
        return rows


BlockTables = Mapping[str, Mapping[int, Sequence[int]]]
"""Blocks of each request, by the name of their group of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCache:
    """Keys or values of one layer."""

    tap: str
    tensor: torch.Tensor
    """Of any layout: where it keeps an element is learned."""
    write: Callable[[torch.Tensor, torch.Tensor], None]
    """The engine's own writer, as `CacheLayout.learn` takes it."""
    num_slots: int
    block_size: int
    row_shape: tuple[int, int]
    """KV heads and head size."""
    group: str = ""
    """Whose block tables it is read through."""
    window: int | None = None
    """Latest tokens that the layer sees; what lies before them may be gone."""

    def slots(self, block_tables: BlockTables, request: int, positions: range) -> list[int]:
        """Return where positions of a request are."""
        blocks, size = block_tables[self.group][request], self.block_size
        return [blocks[at // size] * size + at % size for at in positions]

    def kept(self, num_tokens: int) -> range:
        """Return the positions that the layer keeps of so many tokens."""
        return range(0 if self.window is None else max(0, num_tokens - self.window), num_tokens)


class CacheReader:
    """Reads caches; layers of one layout learn it once."""

    def __init__(self, caches: Sequence[PagedCache]) -> None:
        self._caches = caches
        self._layouts: dict[tuple[object, ...], CacheLayout] = {}

    @property
    def taps(self) -> list[str]:
        """Names of what is read."""
        return [cache.tap for cache in self._caches]

    def read(self, request: int, num_tokens: int, block_tables: BlockTables) -> dict[str, tuple[range, torch.Tensor]]:
        """Return positions and rows [positions, KV heads, head size] of each tap, of one request."""
        return {
            cache.tap: (
                kept := cache.kept(num_tokens),
                self._layout(cache).read(cache.tensor, cache.slots(block_tables, request, kept)),
            )
            for cache in self._caches
        }

    def _layout(self, cache: PagedCache) -> CacheLayout:
        tensor, part = cache.tensor, cache.tap.rpartition(".")[2]
        kind = (part, tensor.dtype, tuple(tensor.shape), tensor.stride())
        if kind not in self._layouts:
            self._layouts[kind] = CacheLayout.learn(
                tensor, cache.write, num_slots=cache.num_slots, row_shape=cache.row_shape
            )
        return self._layouts[kind]
