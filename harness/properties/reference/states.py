"""Adapter of the reference engine's block manager and recurrent states for the state suite."""

from collections.abc import Iterable, Sequence

import torch

from harness.properties.reference.blocks import PoolAndCache
from reference_engine import control
from reference_engine.batch import slots_of
from reference_engine.checkpoint.delta_net import DeltaNetShape
from reference_engine.families.state_cache import StateCache, StateSpec
from reference_engine.prefix_cache import Prefix
from reference_engine.requests.sequence import ScheduledChunk
from reference_engine.requests.sequence import Sequence as EngineSequence
from reference_engine.speculation import drop_drafts

_SHAPE = DeltaNetShape(num_key_heads=1, num_value_heads=1, key_head_dim=1, value_head_dim=1, kernel_size=1)
_GIVEN_UP = -1.0


class StateCacheSubject(PoolAndCache):
    """Block manager and states, called as the engine calls them. A state is one number in both of its tensors."""

    snapshots = "blocks"
    slots_per_request = 64
    """More blocks than the longest request of the suite needs."""

    def __init__(self, *, num_slots: int, block_size: int, hash_bits: int | None = None) -> None:
        super().__init__(num_slots, block_size, hash_bits)
        spec = StateSpec(num_layers=1, shape=_SHAPE, dtype=torch.float64, device=torch.device("cpu"))
        self._drafted: dict[int, Sequence[int]] = {}
        """By request: states of a token and the drafts after it, which one step verifies together."""
        self.states = StateCache(spec, num_slots + 1, block_size, num_guesses=0)
        self.manager._copy_block = self.states.copy
        self.pool._on_discard = lambda block: self.states.fill([block], _GIVEN_UP)

    def allocate(self, request_id: int, token_ids: Sequence[int], salt: str = "") -> int:
        """Take the cached prefix; later steps allocate blocks when they need them."""
        sequence = self.sequences[request_id] = self.new_sequence(request_id, token_ids, 1, salt)
        return self.manager.take_prefix(sequence)

    def write(self, request_id: int, token_ids: Sequence[int], states: Sequence[int]) -> bool:
        """Compute tokens."""
        sequence = self.sequences[request_id]
        if not self._feed(sequence, token_ids):
            return False
        self._compute(sequence, states)
        self._advance(sequence, sequence.num_tokens)
        return True

    def draft(self, request_id: int, token_ids: Sequence[int], states: Sequence[int]) -> bool:
        """Allocate blocks for a token and the drafts after it."""
        sequence = self.sequences[request_id]
        if not self._feed(sequence, token_ids):
            return False
        sequence.num_drafts = len(token_ids) - 1
        self._drafted[request_id] = list(states)
        return True

    def accept(self, request_id: int, num_tokens: int) -> None:
        """Compute them, and keep the first."""
        sequence = self.sequences[request_id]
        self._compute(sequence, self._drafted.pop(request_id))
        stop = sequence.num_computed_tokens + num_tokens
        self.states.accept(slots_of(ScheduledChunk(sequence, sequence.num_computed_tokens, stop), self.pool.block_size))
        drop_drafts(sequence, stop)
        sequence.num_drafts = 0
        self._advance(sequence, stop)
        self.manager.trim(sequence)

    def read(self, request_id: int) -> int:
        """Return the state that the next token would be computed from."""
        sequence = self.sequences[request_id]
        last = sequence.num_computed_tokens - 1
        return self._in_block(sequence.block_table[last // self.pool.block_size]) if last >= 0 else 0

    def rewind(self, request_id: int, num_tokens: int) -> int:
        """Go back to the end of a block."""
        sequence = self.sequences[request_id]
        control.rewind_tokens(sequence, num_tokens, self.pool.block_size, keeps_states=True)
        self.manager.trim(sequence)
        return sequence.num_computed_tokens

    def fork(self, parent_id: int, child_id: int) -> bool:
        """Share all of a request's blocks."""
        parent = self.sequences[parent_id]
        self.sequences[child_id] = child = parent.fork(child_id, parent.params, seed=0)
        self.manager.share(parent, child)
        return True

    def free(self, request_id: int) -> None:
        """Release a request's blocks."""
        self._drafted.pop(request_id, None)
        self.manager.release(self.sequences.pop(request_id))

    def lookup(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Count the cached tokens of a prompt."""
        sequence = self.new_sequence(-1, token_ids, 1, salt)
        num_cached = self.manager.take_prefix(sequence)
        self.manager.release(sequence)
        return num_cached

    def cached_states(self) -> list[tuple[Sequence[int], int]]:
        """Return the states that a look-up finds: after a reset, it may find a block but not the block before it."""
        return [
            (tokens, self._in_block(block))
            for block, tokens in self.cached_blocks().items()
            if self._is_found_from_the_start(self.cache.prefixes[block])
        ]

    def _is_found_from_the_start(self, prefix: Prefix | None) -> bool:
        while prefix is not None and self.cache.find(prefix) is not None:
            prefix = prefix.parent
        return prefix is None

    def slots(self, request_id: int) -> Sequence[int]:
        """Return a request's blocks."""
        return self.block_table(request_id)

    def reset(self) -> None:
        """Forget all prefixes."""
        self.pool.reset_prefix_cache()

    def _feed(self, sequence: EngineSequence, token_ids: Sequence[int]) -> bool:
        before = list(sequence.token_ids)
        sequence.token_ids[sequence.num_computed_tokens :] = token_ids
        if self.manager.grow(sequence, sequence.num_tokens):
            return True
        sequence.token_ids = before
        return False

    def _compute(self, sequence: EngineSequence, states: Sequence[int]) -> None:
        chunk = ScheduledChunk(sequence, sequence.num_computed_tokens, sequence.num_tokens)
        for piece in self.states.plan([chunk]):
            self.states.fill([piece.target], float(states[piece.stop_row - 1]))

    def _advance(self, sequence: EngineSequence, stop: int) -> None:
        chunk = ScheduledChunk(sequence, sequence.num_computed_tokens, stop)
        sequence.num_computed_tokens = stop
        self.manager.publish([chunk])

    def _in_block(self, block: int) -> int:
        """Return the state of a block, which both tensors hold, or what no request has if they differ."""
        held: Iterable[torch.Tensor] = (self.states.conv_LBCW[:, block], self.states.recurrent_LBNAH[:, block])
        values = {value for states in held for value in states.flatten().tolist()}
        return int(values.pop()) if len(values) == 1 else int(_GIVEN_UP)
