"""The layout of a paged cache, learned from the engine's own writer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from harness.engines.torch_modules.values import unfit


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
            HarnessError: BAD_MODULE_TABLE: an element is nowhere, or in two places.
        """
        num_elements = torch.Size(row_shape).numel()
        numbers = torch.arange(1, num_slots * num_elements + 1, device=cache.device).view(num_slots, *row_shape)
        slots, before = torch.arange(num_slots, device=cache.device), cache.clone()
        found = torch.zeros(cache.numel(), dtype=torch.int64, device=cache.device)
        try:
            for bit in range(int(numbers.max()).bit_length()):
                cache.zero_()
                write((numbers >> bit & 1).to(cache.dtype if cache.is_floating_point() else torch.float32), slots)
                found |= (cache.reshape(-1) != 0).long() << bit
        finally:
            cache.copy_(before)
        places = torch.full((numbers.numel() + 1,), -1, dtype=torch.int64, device=cache.device)
        at = found.nonzero()[:, 0]
        places[found[at].clamp(max=numbers.numel())] = at
        if len(at) != numbers.numel() or bool((places[1:] < 0).any()):
            raise unfit(
                "the cache does not keep each element in one place",
                f"a cache of shape {list(cache.shape)}",
                f"{numbers.numel()} elements of {num_slots} slots",
                f"{len(at)} that were written",
            )
        return cls(places[1:].view(num_slots, num_elements), tuple(row_shape))

    def read(self, cache: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """Return the rows of some slots: [len(slots), *row_shape] in the cache's dtype."""
        wanted = self.places[torch.tensor(list(slots), device=self.places.device)]
        rows: torch.Tensor = cache.reshape(-1)[wanted].unflatten(1, self.row_shape)
        return rows
