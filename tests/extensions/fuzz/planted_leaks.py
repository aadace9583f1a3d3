"""Leaks planted in the reference engine, each with the operation, the row and the memory that a search must name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import reference_engine.model_runner
from harness.extensions.faults.reference.drafts import FAULTS
from harness.extensions.faults.reference.injection import replaced, replacing
from harness.formats.recording import RequestInfo
from harness.results.check import Memory
from reference_engine.attention.paged import PagedAttention, SingleBlocks
from reference_engine.block_pool import BlockPool
from reference_engine.families.experts import Experts
from reference_engine.kv_cache import KVCache
from reference_engine.layers import RMSNorm
from reference_engine.scheduler import Scheduler

BLOCK, VICTIM = 8, 1
PROMPTS, NUM_NEW = (21, 9, 13), 3
REQUESTS = [
    RequestInfo(
        id=at, token_ids=[3 + (at * 31 + 7 * i) % 59 for i in range(length + NUM_NEW - 1)], prompt_length=length
    )
    for at, length in enumerate(PROMPTS)
]
FINITE = ("nan", "inf", "1e+30")
NOT_FINITE = ("nan", "inf")
ATTENTION = "model.layers.0.attention"


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A leak, and the truth about it."""

    id: str
    inject: Callable[[], Any]
    memory: Memory
    tap: str
    row: tuple[int, int]
    """(request, position)."""
    values: tuple[str, ...] = FINITE
    schedule: str = "batched"
    model: str = "qwen3-tiny"


def _batch(change: Callable[..., Any]) -> Callable[[], Any]:
    """Change the batch of each step before it is planned."""
    return replacing(
        (reference_engine.model_runner, "build_batch", lambda build, *arguments: change(build(*arguments)))
    )


def _lengths(batch):
    return zip(batch.context_lens, batch.query_lens, strict=True)


def _longer(batch):
    """Contexts of decoding requests are one token too long, where that stays in their blocks."""
    grows = [length + (rows == 1 and length % BLOCK > 0) for length, rows in _lengths(batch)]
    return replace(batch, context_lens=grows, context_lens_R=torch.tensor(grows))


def _whole_blocks(batch):
    """The mask of decoding requests ends with their last block."""
    ends = [-(-length // BLOCK) * BLOCK if rows == 1 else length for length, rows in _lengths(batch)]
    return replace(batch, context_lens=ends, context_lens_R=torch.tensor(ends))


def _not_zeroed(gather, self: Any, layer: Any, single: Any) -> Any:
    """Masked values are multiplied by zero."""
    return gather(self, layer, replace(single, padding=None))


def _stale_entry(to):
    """A decoding request's table begins with another block."""

    def change(batch):
        tables = batch.block_tables_RB.clone()
        if len(tables) > 1 and batch.query_lens == [1] * len(tables):
            tables[0, 0] = to(tables)
        return replace(batch, block_tables_RB=tables)

    return change


def _freed_early():
    """A request's first block is given back while it is running."""
    freed = set()

    def advance(original, self, chunks):
        original(self, chunks)
        for chunk in chunks:
            if chunk.sequence.request_id == 2 and chunk.sequence.request_id not in freed:
                freed.add(chunk.sequence.request_id)
                self._blocks.pool.free([chunk.sequence.block_table[0]])

    def free(original, self: Any, blocks: Any) -> Any:
        return original(self, [block for block in blocks if self.num_owners(block)])

    return replaced((Scheduler, "advance", advance), (BlockPool, "free", free))


def _scores_of_all(plan, self, *arguments):
    """Shorter requests see the keys behind their end, whose values count for nothing."""
    planned = plan(self, *arguments)
    return replace(planned, mask_R11C=None, padding=None) if isinstance(planned, SingleBlocks) else planned


def _norm_of_batch(norm, self, x):
    """A norm takes its statistic from all rows of the step."""
    return norm(self, x) + 0.0 * x.amax(dim=0) if x.dim() == 2 and len(x) > 1 else norm(self, x)


def _one_scale(norm, self, x):
    """Rows of a step are quantised by their common maximum."""
    scale = x.abs().nan_to_num(posinf=1e38).max() if x.dim() == 2 else 1.0
    return norm(self, (x / scale * 32767).round() / 32767 * scale)


def _counted(route, self, x, batch, prefix):
    """Tokens are sent elsewhere where an expert has more than others: by the load of all rows."""
    logits = self.router(x)
    counts = logits.softmax(dim=-1).nan_to_num(1.0).sum(dim=0)
    batch.tap(prefix, "mlp.gate", logits)
    weights, chosen = (logits - 1e-3 * counts).softmax(dim=-1, dtype=torch.float32).topk(self.num_chosen, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True) if self.normalizes_weights else weights
    batch.tap(prefix, "mlp.gate.topk", chosen)
    batch.tap(prefix, "mlp.gate.1", weights)
    return weights, chosen


def _into_unset(attend, self, layer, q, k, v, batch):
    """The context is added to a buffer that nothing has set."""
    return torch.empty_like(q).mul_(0).add_(attend(self, layer, q, k, v, batch))


def _last_row_unset(norm, self, x):
    """A kernel leaves the last row of a step as its buffer was."""
    out = torch.empty_like(x)
    if x.dim() < 2 or len(x) < 2:
        return norm(self, x)
    out[:-1] = norm(self, x)[:-1]
    return out


def _key_of_the_row_before(store, self, layer, k, v, slots):
    """Each row adds what its slot held before."""
    old_k, _ = self.gather(layer, slots)
    store(self, layer, k + 1e-6 * old_k, v, slots)


def _of_the_catalogue(id):
    return next(fault.inject for fault in FAULTS if fault.id == id)


def _zeroed_by_where(gather, self, layer, single):
    """Legitimate: masked places are read, and replaced."""
    k, v = gather(self, layer, replace(single, padding=None))
    if single.mask_R11C is None:
        return k, v
    is_key = single.mask_R11C[:, 0, 0, :, None, None]
    return torch.where(is_key, k, 0.0), torch.where(is_key, v, 0.0)


def _thrown_away(norm, self: Any, x: Any) -> Any:
    """Legitimate: a row more is computed, from memory that nothing has set, and left out."""
    return norm(self, torch.cat([x, torch.empty_like(x[:1])]))[: len(x)]


ZEROED_BY_WHERE = replacing((PagedAttention, "_gather_blocks", _zeroed_by_where))
THROWN_AWAY = replacing((RMSNorm, "__call__", _thrown_away))
LEAKS = [
    Planted(id="context-not-shortened", inject=_of_the_catalogue("context-not-shortened"), memory=Memory.UNUSED,
            tap=ATTENTION, row=(0, PROMPTS[0] - 1), schedule="rewound"),
    Planted(id="one-key-too-many", inject=_batch(_longer), memory=Memory.UNUSED, tap=ATTENTION, row=(0, PROMPTS[0])),
    Planted(id="one-block-too-many", inject=_batch(_whole_blocks), memory=Memory.UNUSED, tap=ATTENTION,
            row=(0, PROMPTS[0])),
    Planted(id="zero-times-nan", inject=replacing((PagedAttention, "_gather_blocks", _not_zeroed)),
            memory=Memory.UNUSED, tap=ATTENTION, row=(1, PROMPTS[1]), values=NOT_FINITE),
    Planted(id="no-mask", inject=replacing((PagedAttention, "_whole_past", _scores_of_all)), memory=Memory.UNUSED,
            tap=ATTENTION, row=(1, PROMPTS[1])),
    Planted(id="stale-entry-of-a-free-block", inject=_batch(_stale_entry(lambda tables: int(tables.max()) + 1)),
            memory=Memory.UNUSED, tap=ATTENTION, row=(0, PROMPTS[0])),
    Planted(id="stale-entry-of-another-request", inject=_batch(_stale_entry(lambda tables: tables[VICTIM, 0])),
            memory=Memory.OTHERS, tap=ATTENTION, row=(0, PROMPTS[0])),
    Planted(id="freed-too-early", inject=_freed_early, memory=Memory.UNUSED, tap=ATTENTION, row=(2, PROMPTS[2])),
    Planted(id="norm-of-the-batch", inject=replacing((RMSNorm, "__call__", _norm_of_batch)), memory=Memory.OTHERS,
            tap="model.layers.0.post_attention_layernorm", row=(0, PROMPTS[0]), values=NOT_FINITE),
    Planted(id="one-scale-for-all-rows", inject=replacing((RMSNorm, "__call__", _one_scale)), memory=Memory.OTHERS,
            tap="model.layers.0.post_attention_layernorm", row=(0, PROMPTS[0])),
    Planted(id="router-counts", inject=replacing((Experts, "_route", _counted)), memory=Memory.OTHERS,
            tap="model.layers.0.mlp.gate.1", row=(0, PROMPTS[0]), model="qwen3-moe-tiny"),
    Planted(id="added-to-an-unset-buffer", inject=replacing((PagedAttention, "attend", _into_unset)),
            memory=Memory.SCRATCH, tap=ATTENTION, row=(0, 0), values=NOT_FINITE),
    Planted(id="last-row-not-written", inject=replacing((RMSNorm, "__call__", _last_row_unset)), memory=Memory.SCRATCH,
            tap="model.layers.0.input_layernorm", row=(2, PROMPTS[2] - 1)),
    Planted(id="added-to-what-the-slot-held", inject=replacing((KVCache, "store", _key_of_the_row_before)),
            memory=Memory.UNUSED, tap=ATTENTION, row=(0, 0)),
]  # fmt: skip
