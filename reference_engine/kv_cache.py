"""The K and V of all computed tokens, in blocks that any request can own.

A slot is one token's place: slot = block * S + offset. K and V are stored by slot, and read back by block table.

Shapes: T tokens, R requests, C context tokens, B blocks, S slots in a block, K KV heads, H head dim.
"""

from __future__ import annotations

import math

import torch

from reference_engine.block_pool import NULL_BLOCK
from reference_engine.cache_spec import CacheSpec
from reference_engine.errors import CapacityError

__all__ = ["KVCache", "context_slots"]


class KVCache:
    """One tensor [2, layers, B, S, K, H]: K at index 0, V at index 1; [1, ...] where values are a part of the keys.

    Of a float8 the bytes are moved: torch has no indexing of its own for it.

    Raises:
        CapacityError: the memory does not hold it.
    """

    def __init__(self, spec: CacheSpec, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._value_dim = spec.value_dim
        self._dtype, self._stored_dtype = spec.dtype, spec.stored_dtype
        self.scales = spec.scales or ((1.0, 1.0),) * spec.num_layers
        """Of K and of V for each layer; 1 where they are stored as they are."""
        shape = (spec.num_streams, spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        # Not zeroed: no slot is read before it is written, and untouched memory is not even allocated by the system.
        self.data = _allocate(shape, spec)
        if spec.device.type != "cpu":
            # What an earlier engine left there, of the same tokens in the same slots, would hide a missing write.
            self.data.fill_(math.nan)
        spec.prepare(self.data)
        # The exception is the null block, which padding reads under a mask: 0 * NaN would be NaN.
        self.data[:, :, NULL_BLOCK] = 0
        moved = self.data if spec.stored_dtype is None else self.data.view(torch.uint8)
        self._layers = moved
        self._k = [layer.flatten(0, 1) for layer in moved[0]]
        self._v = [layer.flatten(0, 1) for layer in moved[1]] if spec.value_dim is None else []

    def close(self) -> None:
        """Give the memory back."""
        self.data = self._layers = self.data.new_empty(0)
        self._k, self._v = [], []

    def store(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Write each row's K and V to its slot."""
        self._k[layer].index_copy_(0, slots_T, self._as_stored(layer, 0, k_TKH))
        if self._v:
            self._v[layer].index_copy_(0, slots_T, self._as_stored(layer, 1, v_TKH))

    def copy_block(self, source: int, target: int) -> None:
        """Copy the K and V of all layers."""
        self.data[:, :, target] = self.data[:, :, source]

    def poison_block(self, block: int) -> None:
        """Make reads of blocks that a request does not own visible."""
        self.data[:, :, block] = math.nan

    def gather(self, layer: int, slots_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read K and V, each [C, K, H], from slots."""
        k_CKH = self._as_read(layer, 0, self._k[layer].index_select(0, slots_C))
        if not self._v:
            return k_CKH, k_CKH[..., : self._value_dim]
        return k_CKH, self._as_read(layer, 1, self._v[layer].index_select(0, slots_C))

    def gather_blocks(self, layer: int, blocks_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read K and V of whole blocks, each [B, S, K, H]: half the time of the same slots one by one."""
        k_BSKH = self._as_read(layer, 0, self._layers[0, layer].index_select(0, blocks_B))
        if not self._v:
            return k_BSKH, k_BSKH[..., : self._value_dim]
        return k_BSKH, self._as_read(layer, 1, self._layers[1, layer].index_select(0, blocks_B))

    def first(self, layer: int, block: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first K and V of a block, each [C, K, H]: views, where they are stored as they are."""
        stored = self._layers[:, layer, block, :num_tokens]
        k_CKH = self._as_read(layer, 0, stored[0])
        return k_CKH, self._as_read(layer, 1, stored[1]) if self._v else k_CKH[..., : self._value_dim]

    def _as_stored(self, layer: int, part: int, x: torch.Tensor) -> torch.Tensor:
        if self._stored_dtype is None:
            return x
        # Beyond the largest number a cast gives that number, infinity or NaN, by dtype and device.
        top = torch.finfo(self._stored_dtype).max
        quotient = (x.to(torch.float32) / self.scales[layer][part]).clamp(-top, top)
        return quotient.to(self._stored_dtype).view(torch.uint8)

    def _as_read(self, layer: int, part: int, stored: torch.Tensor) -> torch.Tensor:
        if self._stored_dtype is None:
            return stored
        return (stored.view(self._stored_dtype).to(torch.float32) * self.scales[layer][part]).to(self._dtype)


def context_slots(
    block_tables_RB: torch.Tensor, block_size: int, num_tokens: int, first_R: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the slots [R, C] of `num_tokens` positions of each block table, from `first_R` on (None: from 0)."""
    if first_R is not None:
        positions_RC = first_R[:, None] + torch.arange(num_tokens, device=first_R.device)
        return block_tables_RB.gather(1, positions_RC // block_size) * block_size + positions_RC % block_size
    offsets_S = torch.arange(block_size, device=block_tables_RB.device)
    slots_RBS = block_tables_RB[:, :, None] * block_size + offsets_S
    return slots_RBS.flatten(1)[:, :num_tokens]


def _allocate(shape: tuple[int, ...], spec: CacheSpec) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=spec.kept_dtype, device=spec.device)
    except (RuntimeError, TypeError) as error:  # torch's out-of-memory error is a RuntimeError; too large an int is not
        raise CapacityError(
            "the KV cache does not fit into memory",
            where=spec.device,
            actual=f"{shape[2]} blocks of {shape[3]} tokens = {math.prod(shape) * spec.kept_dtype.itemsize} bytes",
            hint="Lower num_blocks, max_model_len or max_num_seqs.",
        ) from error
