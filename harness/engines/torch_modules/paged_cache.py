"""A request's keys and values in a live engine's paged cache, read through its block table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.engines.torch_modules.cache_layout import CacheLayout

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
