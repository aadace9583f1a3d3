"""The states that recurrences and their convolutions go on from, kept by block beside K and V.

The state of a block is the one after the last token that was computed in it. So a block table names states as it names
K and V: a prefix that others find brings the state at its end along, a copied block its state, and a block that is
given up takes it with it. What a table cannot name is a state amid a block that the request has gone beyond: a request
that goes back computes again from the end of a block on. (vLLM keeps the states of its prefix cache so, too, with
blocks as long as a state is large.)

Guesses that a step verifies have states of their own, which become their blocks' when the guesses are accepted.

Shapes: T tokens, L layers with states, B blocks, C channels, W kernel width, N heads, A key head dim, H value head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from reference_engine.attention.backend import AttentionBackend
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.checkpoint.delta_net import DeltaNetShape
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.config import EngineConfig
from reference_engine.errors import BlockError, CapacityError
from reference_engine.requests.sequence import ScheduledChunk

__all__ = ["Piece", "StateCache", "StateSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The sizes of the states of one model."""

    num_layers: int
    """Layers that have a state."""
    shape: DeltaNetShape
    dtype: torch.dtype
    """Of what a convolution sees. What a recurrence goes on from is float32, as in transformers."""
    device: torch.device

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> StateSpec | None:
        """Return the sizes of a model's states; None: it has none."""
        shapes = list(config.delta_nets.values())
        return cls(num_layers=len(shapes), shape=shapes[0], dtype=dtype, device=device) if shapes else None

    @property
    def conv_shape(self) -> tuple[int, int]:
        """[C, W]: what the convolution of one layer sees."""
        return self.shape.conv_size, self.shape.kernel_size

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """[N, A, H]: the recurrent state of one layer."""
        return self.shape.num_value_heads, self.shape.key_head_dim, self.shape.value_head_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers' states of one block."""
        itemsize = torch.float32.itemsize
        return self.num_layers * (
            math.prod(self.conv_shape) * self.dtype.itemsize + math.prod(self.recurrent_shape) * itemsize
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one request that lie in one block, or one guess: what goes on from one state and ends in another."""

    first_row: int
    stop_row: int
    source: int
    """Number of the state that it goes on from; that of the null block is zero."""
    target: int
    """Number of the state that it ends in."""


class StateCache:
    """One state for each block, and some for guesses, of all layers that have any.

    Raises:
        CapacityError: the memory does not hold them.
    """

    def __init__(self, spec: StateSpec, num_blocks: int, block_size: int, num_guesses: int) -> None:
        self.spec, self.num_blocks, self.block_size = spec, num_blocks, block_size
        self.conv_LBCW, self.recurrent_LBNAH = self._allocate(num_blocks + num_guesses)
        self.conv_LBCW[:, NULL_BLOCK], self.recurrent_LBNAH[:, NULL_BLOCK] = 0, 0
        self.num_tokens = [0] * (num_blocks + num_guesses)
        """By number of a state, the tokens that it is computed from."""
        self._guesses: dict[int, int] = {}
        """By slot of a guess of the last step, the number of its state."""

    @classmethod
    def open(cls, spec: StateSpec, backend: AttentionBackend, config: EngineConfig) -> StateCache:
        """Allocate the states of all blocks of a backend, and those of a step's drafts."""
        num_guesses = config.max_num_seqs * config.num_speculative_tokens
        return cls(spec, backend.num_blocks, backend.block_size, num_guesses)

    def plan(self, chunks: Iterable[ScheduledChunk]) -> list[Piece]:
        """Cut a step's rows into pieces, and note what will be in the states that they end in.

        Raises:
            BlockError: a chunk does not begin where the state of its block ends; this is a bug of the engine.
        """
        pieces: list[Piece] = []
        row, self._guesses = 0, {}
        for chunk in chunks:
            pieces += self._pieces(chunk, row)
            row += chunk.num_tokens
        self._grow(self.num_blocks + len(self._guesses))
        return pieces

    def accept(self, slots: Sequence[int]) -> None:
        """Let the states of the last step's guesses in these slots be those of their blocks."""
        for block, slot in {slot // self.block_size: slot for slot in slots if slot in self._guesses}.items():
            self.copy(self._guesses[slot], block)

    def copy(self, source: int, target: int) -> None:
        """Copy the state of one block, or one guess, to a block."""
        for states in (self.conv_LBCW, self.recurrent_LBNAH):
            states[:, target] = states[:, source]
        self.num_tokens[target] = self.num_tokens[source]

    def fill(self, blocks: Sequence[int], value: float) -> None:
        """Write over the states of blocks that hold no request's, so that a read of one shows."""
        for states in (self.conv_LBCW, self.recurrent_LBNAH):
            states[:, list(blocks)] = value

    def close(self) -> None:
        """Give the memory back."""
        self.conv_LBCW, self.recurrent_LBNAH = (x.new_empty(0) for x in (self.conv_LBCW, self.recurrent_LBNAH))

    def _pieces(self, chunk: ScheduledChunk, first_row: int) -> Iterable[Piece]:
        """Yield the pieces of one request: up to the end of each block, then guess by guess."""
        size, table = self.block_size, chunk.sequence.block_table
        num_guesses = chunk.sequence.num_drafts if chunk.samples else 0
        source = table[(chunk.start - 1) // size] if chunk.start else NULL_BLOCK
        if self.num_tokens[source] != chunk.start:
            raise BlockError(
                f"request {chunk.sequence.request_id} does not go on where its state ends", where=f"block {source}",
                expected=f"a state of {chunk.start} tokens", actual=self.num_tokens[source],
                hint="After a step that failed, suspend the request and resume it.",
            )  # fmt: skip
        start = chunk.start
        while start < chunk.stop:
            is_guess = start >= chunk.stop - num_guesses
            block = table[start // size]
            stop = start + 1 if is_guess else min((start // size + 1) * size, chunk.stop - num_guesses)
            target = self._new_guess(block * size + start % size) if is_guess else block
            yield Piece(first_row + start - chunk.start, first_row + stop - chunk.start, source, target)
            self.num_tokens[target] = stop
            source, start = target, stop

    def _new_guess(self, slot: int) -> int:
        number = self._guesses[slot] = self.num_blocks + len(self._guesses)
        if number == len(self.num_tokens):
            self.num_tokens.append(0)
        return number

    def _grow(self, num_states: int) -> None:
        """Make room for the states of more guesses than the engine's options speak of."""
        num_more = num_states - self.conv_LBCW.shape[1]
        if num_more > 0:
            more = self._allocate(num_more)
            self.conv_LBCW = torch.cat([self.conv_LBCW, more[0]], dim=1)
            self.recurrent_LBNAH = torch.cat([self.recurrent_LBNAH, more[1]], dim=1)

    def _allocate(self, num_states: int) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.spec
        try:
            conv = torch.empty((spec.num_layers, num_states, *spec.conv_shape), dtype=spec.dtype, device=spec.device)
            shape = (spec.num_layers, num_states, *spec.recurrent_shape)
            return conv, torch.empty(shape, dtype=torch.float32, device=spec.device)
        except (RuntimeError, TypeError) as error:
            raise CapacityError(
                "the states do not fit into memory", where=spec.device,
                actual=f"{num_states} states of {spec.num_bytes} bytes",
                hint="Raise block_size, or lower num_blocks, max_model_len or max_num_seqs.",
            ) from error  # fmt: skip
