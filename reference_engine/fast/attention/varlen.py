"""Attention by torch's own variable-length kernel (FlashAttention), reading pages through the block table. CUDA only.

It has not run on a GPU, where it needs torch 2.13. It was tested against the float64 definition with the kernel
replaced by a function of the same signature.

Shapes: T tokens, R requests, B blocks, N query heads, K KV heads, H head dim.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch

from reference_engine.batch import Batch
from reference_engine.cache_spec import CacheSpec
from reference_engine.fast.attention.limits import KernelLimits
from reference_engine.kv_cache import KVCache, context_slots

__all__ = ["VarlenAttention", "VarlenPlan"]

PAGE_MULTIPLE = 256
"""FlashAttention 2 takes no other pages."""


@cache
def _kernel() -> Callable[..., torch.Tensor] | None:
    """Return `varlen_attn` where this torch has it with block tables (2.13 does)."""
    try:
        kernel: Callable[..., torch.Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return kernel if {"block_table", "seqused_k", "num_splits"} <= set(inspect.signature(kernel).parameters) else None


class VarlenLimits(KernelLimits):
    """The limits of FlashAttention 2, if torch has it."""

    __slots__ = ()

    def refusals(self, spec: CacheSpec) -> list[tuple[str, str]]:
        """See `KernelLimits.refusals`; this also looks at torch."""
        refusals = super().refusals(spec)
        if _kernel() is None:
            refusals.append(("a torch whose varlen_attn reads block tables (2.13 does)", torch.__version__))
        return refusals


_LIMITS = VarlenLimits(
    dtypes=(torch.bfloat16, torch.float16),
    head_dims=tuple(range(8, 257, 8)),
    block_size_multiple=PAGE_MULTIPLE,
    device_types=("cuda",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenPlan:
    """The step's lengths as the kernel wants them, for all layers."""

    cu_seq_q_R1: torch.Tensor
    """int32 [R + 1]: first row of each request, and the number of rows."""
    seqused_k_R: torch.Tensor
    """int32 [R]: keys of each request."""
    block_table_RB: torch.Tensor
    """int32."""
    max_q: int
    max_k: int


class VarlenAttention:
    """Read K and V through the block table inside torch's kernel."""

    limits = _LIMITS
    has_blocks = True

    def __init__(self, spec: CacheSpec) -> None:
        kernel = _kernel()
        assert kernel is not None, "find_backend has asked"
        self._attend = kernel
        self.block_size = spec.block_size
        self.num_blocks = spec.num_blocks or spec.default_num_blocks(spec.block_size)
        self.cache = KVCache(spec, self.num_blocks, self.block_size)
        self._layer_windows = spec.layer_windows

    def plan(self, batch: Batch) -> VarlenPlan:
        """Add up the lengths, on the host."""
        device = self.cache.data.device
        starts = torch.tensor([0, *accumulate(batch.query_lens)], dtype=torch.int32)
        return VarlenPlan(
            cu_seq_q_R1=starts.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else starts,
            seqused_k_R=batch.context_lens_R.to(torch.int32),
            block_table_RB=batch.block_tables_RB.to(torch.int32),
            max_q=max(batch.query_lens),
            max_k=max(batch.context_lens),
        )

    def attend(
        self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        plan: VarlenPlan = batch.plan
        self.cache.store(layer, k_TKH, v_TKH, batch.slot_mapping_T)
        k_cache_BSKH, v_cache_BSKH = self.cache.data[:, layer]
        window = self._layer_windows[layer]
        return self._attend(
            q_TNH.contiguous(),
            k_cache_BSKH,
            v_cache_BSKH,
            plan.cu_seq_q_R1,
            None,
            plan.max_q,
            plan.max_k,
            scale=q_TNH.shape[-1] ** -0.5,
            # Aligned at the last key; a window of W is the row itself and W - 1 before it.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
            seqused_k=plan.seqused_k_R,
            block_table=plan.block_table_RB,
            # Split-KV with pages leaves rows of later requests unwritten (pytorch#194167); one split also gives every
            # row the same bits whatever else is in the batch.
            num_splits=1,
        )

    def read_back(self, layer: int, block_table: Sequence[int], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionBackend.read_back`."""
        table_1B = torch.tensor([list(block_table)], device=self.cache.data.device)
        return self.cache.gather(layer, context_slots(table_1B, self.block_size, num_tokens)[0])
