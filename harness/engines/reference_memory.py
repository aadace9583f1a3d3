"""The reference engine's cache as memory to poison: what its own bookkeeping says is nobody's, or one request's."""

from collections.abc import Callable

import torch

from harness.engines.poison import in_range
from reference_engine import LLMEngine
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.requests.sequence import Sequence


class ReferenceMemory:
    """The slots of one engine's cache, and the states of its blocks.

    The null block is left: the engine keeps zeros there, and never writes it.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._filled: torch.Tensor | None = None
        """[slots] bool: filled before, in blocks that nobody may have written since."""

    def fill_unused(self, value: float) -> int:
        """See `FillsUnused`: free blocks, whatever tables name them, and slots behind what is computed."""
        if self._engine.runner.backend.cache is None:
            return 0
        unused = self._unused()
        anew = unused if self._filled is None else unused & ~self._filled
        self._filled = unused & self._of_blocks(lambda block: not self._engine.pool.num_owners(block))
        return self._fill(anew, value) + self._fill_states(self._by_block(anew).all(1), value)

    def fill_states(self, request: int, value: float) -> int:
        """See `FillsStates`: the blocks that the request alone owns, and that nobody can find in the cache."""
        running = [item for item in self._engine.scheduler.running if item.request_id == request]
        if self._engine.runner.backend.cache is None or not running:
            return 0
        slots = torch.zeros(self._num_slots, dtype=torch.bool)
        slots[self._slots(running[0])] = True
        own = slots & ~self._of_blocks(self._is_shared)
        return self._fill(own, value) + self._fill_states(self._by_block(own).any(1), value)

    @property
    def _num_slots(self) -> int:
        return self._engine.pool.num_blocks * self._engine.pool.block_size

    def _unused(self) -> torch.Tensor:
        """[slots] bool."""
        pool = self._engine.pool
        unused = ~self._of_blocks(self._is_cached)
        for sequence in self._engine.scheduler.running:
            unused[self._slots(sequence)] = False
        unused |= self._of_blocks(lambda block: not pool.num_owners(block) and not self._is_cached(block))
        unused[: pool.block_size * (NULL_BLOCK + 1)] = False
        return unused

    def _of_blocks(self, is_wanted: Callable[[int], bool]) -> torch.Tensor:
        """[slots] bool: those of some blocks."""
        pool = self._engine.pool
        blocks = torch.tensor([is_wanted(block) for block in range(pool.num_blocks)])
        return blocks.repeat_interleave(pool.block_size)

    def _is_cached(self, block: int) -> bool:
        cache = self._engine.pool.prefix_cache
        return cache is not None and block in cache

    def _is_shared(self, block: int) -> bool:
        return self._engine.pool.num_owners(block) > 1 or self._is_cached(block)

    def _slots(self, sequence: Sequence) -> torch.Tensor:
        """Return the slots [tokens] of what a request has computed."""
        size, positions = self._engine.pool.block_size, torch.arange(sequence.num_computed_tokens)
        return torch.tensor(list(sequence.block_table))[positions // size] * size + positions % size

    def _fill(self, is_wanted: torch.Tensor, value: float) -> int:
        cache = self._engine.runner.backend.cache
        assert cache is not None
        slots = is_wanted.nonzero()[:, 0].to(cache.data.device)
        flat = cache.data.flatten(2, 3)  # [K and V, layers, slots, KV heads, head size]
        flat.index_fill_(2, slots, in_range(value, flat.dtype))
        return len(slots) * flat[:, :, :1].numel()

    def _by_block(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.view(-1, self._engine.pool.block_size)

    def _fill_states(self, is_wanted: torch.Tensor, value: float) -> int:
        """Fill the states of some blocks, [blocks] bool."""
        states = self._engine.runner.states
        if states is None:
            return 0
        blocks = is_wanted.nonzero()[:, 0]
        kept = (states.conv_LBCW, states.recurrent_LBNAH)
        for item in kept:
            item.index_fill_(1, blocks.to(item.device), in_range(value, item.dtype))
        return len(blocks) * sum(item[:, :1].numel() for item in kept)
