"""Faults that show only in later chunks, after a prefix hit, after a fork or when a preempted request comes back."""

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

import reference_engine.attention.paged
import reference_engine.model_runner
from harness.extensions.faults.fault import BLOCK_SIZE, PROMPT_LENGTHS, Category, Fault, Row, table_of
from harness.extensions.faults.reference.attention import WINDOWED, attend, causal, merge_exactly, tiled
from harness.extensions.faults.reference.cache import prefixes_changed
from harness.extensions.faults.reference.injection import InjectedFault, device_of, replaced, replacing
from harness.extensions.faults.reference.position import CHUNK, per_row, positions_changed
from reference_engine.block_manager import BlockManager
from reference_engine.kv_cache import KVCache
from reference_engine.model import Attention
from reference_engine.prefix_cache import PrefixCache

_ATTENTION, _K_CACHE, _Q_ROPE = "model.layers.0.attention", "model.layers.0.k_cache", "model.layers.0.q_rope"
_Q_NORM = "model.layers.0.self_attn.q_norm"
_HIT = (PROMPT_LENGTHS[0] - 1) // BLOCK_SIZE * BLOCK_SIZE
"""Tokens of the first prompt that its copy finds in the cache."""
_SECOND_CHUNK: Row = (0, CHUNK)
_BEHIND_THE_HIT: Row = (len(PROMPT_LENGTHS), _HIT)
_PREEMPTED = 2
"""The request that is preempted: the youngest."""


def _later_chunks(compute: Callable[..., torch.Tensor]) -> Any:
    """Replace attention of chunks that have a past: `compute` gets q, k, v and the window."""

    def make(
        original: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: int | None = None,
    ) -> torch.Tensor:
        return compute(q, k, v, window) if len(q) < len(k) else original(q, k, v, window)

    return replacing((reference_engine.attention.paged, "attend_chunk", make))


def _masked(change: Callable[[torch.Tensor, int], torch.Tensor], **rest: Any) -> Any:
    """Change the causal mask [rows, keys] of later chunks; `change` gets it and how many keys are old."""

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        return attend(q, k, v, change(causal(len(q), len(k), window), len(k) - len(q)), **rest)

    return _later_chunks(compute)


def _own_only(mask: torch.Tensor, num_old: int) -> torch.Tensor:
    return mask & (torch.arange(mask.shape[1]) >= num_old)


def _sees_the_next(mask: torch.Tensor, num_old: int) -> torch.Tensor:
    return torch.ones_like(mask).tril(num_old + 1)


def _top_left(mask: torch.Tensor, num_old: int) -> torch.Tensor:
    return torch.ones_like(mask).tril()


def _in_two_parts(merge: Callable[[list[torch.Tensor], list[torch.Tensor]], torch.Tensor]) -> Any:
    """Attend to the old keys and to the chunk's own by themselves; `merge` gets outputs and log-sum-exps."""

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        num_old, group = len(k) - len(q), q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("tnh,cnh->ntc", q.float(), wide_k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~causal(len(q), len(k), window), -torch.inf)
        outs, sums = [], []
        for part, values in zip(scores.split([num_old, len(q)], dim=-1), wide_v.split([num_old, len(q)]), strict=True):
            outs.append(torch.einsum("ntc,cnh->tnh", part.softmax(dim=-1), values))
            sums.append(part.logsumexp(dim=-1).T[..., None])
        return merge(outs, sums).to(q.dtype)

    return _later_chunks(compute)


def _averaged(outs: list[torch.Tensor], sums: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(outs).mean(dim=0)


def _in_base_two(outs: list[torch.Tensor], sums: list[torch.Tensor]) -> torch.Tensor:
    return merge_exactly(outs, [item * torch.log(torch.tensor(2.0)) for item in sums])


def _old_in_fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    num_old = len(k) - len(q)
    k, v = (torch.cat((x[:num_old].to(torch.float8_e4m3fn).to(x.dtype), x[num_old:])) for x in (k, v))
    return attend(q, k, v, causal(len(q), len(k), window))


def _padded_keys(
    original: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Keys are padded with zeros to a multiple of 16, and the padding is not masked."""
    more = -len(k) % 16
    padded = [torch.cat((x, x.new_zeros(more, *x.shape[1:]))) for x in (k, v)]
    mask = torch.nn.functional.pad(causal(len(q), len(k), window), (0, more), value=True)
    return attend(q, padded[0], padded[1], mask)


def _wider_window(
    original: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """In later chunks the window counts from the chunk's first row, so that its other rows see too much."""
    return original(q, k, v, None if len(q) < len(k) else window)


def _is_later(chunk: Any) -> bool:
    return chunk.start > 0 and not chunk.is_decode


def _is_resumed(chunk: Any) -> bool:
    """Whether a preempted request is computed anew, which has tokens of its own by now."""
    return chunk.start == 0 and bool(chunk.sequence.sampled_token_ids)


def _restarting(positions: torch.Tensor, chunks: Any) -> torch.Tensor:
    return positions - per_row(chunks, lambda chunk: chunk.start if _is_later(chunk) else 0)


def _resumed_plus_one(positions: torch.Tensor, chunks: Any) -> torch.Tensor:
    return positions + per_row(chunks, lambda chunk: int(_is_resumed(chunk)))


def _resumed_behind_its_past(positions: torch.Tensor, chunks: Any) -> torch.Tensor:
    """The recomputed rows go on from the prompt's end instead of starting at 0."""
    return positions + per_row(chunks, lambda chunk: chunk.sequence.num_prompt_tokens if _is_resumed(chunk) else 0)


def _shifted_by_the_batch(positions: torch.Tensor, chunks: Any) -> torch.Tensor:
    """The rows that stand before a prompt's chunk in the step are added to its positions."""
    before, shifts = 0, []
    for chunk in chunks:
        shifts += [0 if chunk.is_decode else before] * chunk.num_tokens
        before += chunk.num_tokens
    return positions + torch.tensor(shifts)


def _batches(change: Callable[[Any, Any], Any]) -> Any:
    """Change the step's batch once it is built: `change` gets it and its chunks."""

    def make(build: Callable[..., Any], chunks: Any, *args: Any, **kwargs: Any) -> Any:
        batch = build(chunks, *args, **kwargs)
        with device_of(batch):
            return change(batch, chunks)

    return (reference_engine.model_runner, "build_batch", make)


def _slots_from_zero(batch: Any, chunks: Any) -> Any:
    """A later chunk is written from its request's first slot on."""
    slots, at = batch.slot_mapping_T.clone(), 0
    for chunk in chunks:
        if _is_later(chunk):
            table = chunk.sequence.block_table
            for row in range(chunk.num_tokens):
                slots[at + row] = table[row // BLOCK_SIZE] * BLOCK_SIZE + row % BLOCK_SIZE
        at += chunk.num_tokens
    return replace(batch, slot_mapping_T=slots)


def _last_row_nowhere(batch: Any, chunks: Any) -> Any:
    """The last row of each chunk that is not its prompt's last goes to the null block."""
    slots, at = batch.slot_mapping_T.clone(), 0
    for chunk in chunks:
        at += chunk.num_tokens
        if not chunk.samples:
            slots[at - 1] = 0
    return replace(batch, slot_mapping_T=slots)


def _logits_of_the_first_row(batch: Any, chunks: Any) -> Any:
    """Of what comes after a hit, the first row is sampled from."""
    rows, at = [], 0
    for chunk in chunks:
        if chunk.samples:
            rows.append(at if _is_later(chunk) else at + chunk.num_tokens - 1)
        at += chunk.num_tokens
    is_changed = batch.sampled_rows_ is not None
    return replace(batch, sampled_rows_=torch.tensor(rows)) if is_changed else batch


def _zeroed(init: Callable[..., None], self: KVCache, *args: Any) -> None:
    """Slots that no step wrote are zero, in every run of the fault."""
    init(self, *args)
    self.data.zero_()


def _in_zeroed_memory(*changes: Any) -> Callable[[], AbstractContextManager[InjectedFault]]:
    return lambda: replaced((KVCache, "__init__", _zeroed), *changes)


def _stale_table(batch: Any, chunks: Any) -> Any:
    """Attention of a later chunk goes by the table as it was before the chunk."""
    tables = batch.block_tables_RB.clone()
    for row, chunk in enumerate(chunks):
        if _is_later(chunk):
            tables[row, -(-chunk.start // BLOCK_SIZE) :] = 0
    return replace(batch, block_tables_RB=tables)


def _unnormed_later(project: Callable[..., Any], self: Attention, x: torch.Tensor, batch: Any, prefix: str) -> Any:
    if any(1 < query < context for query, context in zip(batch.query_lens, batch.context_lens, strict=True)):
        self = replace(self, q_norm=torch.clone, k_norm=torch.clone)  # type: ignore[arg-type]
    return project(self, x, batch, prefix)


def _table_reversed(take: Callable[..., int], self: BlockManager, sequence: Any) -> int:
    computed = take(self, sequence)
    sequence.block_table = array("q", reversed(sequence.block_table))
    return computed


def _one_token_too_many(take: Callable[..., int], self: BlockManager, sequence: Any) -> int:
    """A hit counts one token more than it has."""
    computed = take(self, sequence)
    sequence.num_computed_tokens += bool(computed)
    return int(sequence.num_computed_tokens)


def _has_same_key(prefix: Any, cached: Any) -> bool:
    return bool(prefix.key == cached.key)


def _without_last_token(cache: PrefixCache) -> None:
    cache._hash = lambda data: data[:-8]


def _without_order(cache: PrefixCache) -> None:
    cache._hash = lambda data: bytes(sorted(data))


def _keys_copied_only(cache: KVCache, source: int, target: int) -> None:
    cache.data[0, :, target] = cache.data[0, :, source]


def _first_layer_copied_only(cache: KVCache, source: int, target: int) -> None:
    cache.data[:, 0, target] = cache.data[:, 0, source]


def _copied(copy: Callable[[KVCache, int, int], None]) -> Any:
    """Change what is copied when a request writes into a block that it shares."""
    return _in_zeroed_memory((KVCache, "copy_block", lambda original, self, source, target: copy(self, source, target)))


def _first_token_taken_for_computed(release: Callable[..., None], self: BlockManager, sequence: Any) -> None:
    """A preempted request starts again after its first token."""
    release(self, sequence)
    if sequence.finish_reason is None:
        sequence.num_computed_tokens = 1


_path = table_of(category=Category.SCHEDULER)


def _fault(
    id: str,
    summary: str,
    inject: Any,
    cause: str,
    tap: str,
    row: Row,
    schedule: str,
    dtype: str = "float32",
    **rest: Any,
) -> Fault:
    return _path(id, summary, inject, cause, tap, row, schedule=schedule, dtype=dtype, **rest)


_CHUNKED, _MIXED, _PREFIX, _AGAIN = f"chunked:{CHUNK}", "mixed:8", "prefix-hit", "preempted"
_BF16, _FP16 = "bfloat16", "float16"
_LIKE = tuple(range(10, 26))
_LAST_DIFFERS = ((*_LIKE[:7], 99, *_LIKE[8:]), (*_LIKE[:7], 77, *_LIKE[8:]))
_REORDERED = ((*_LIKE[:8], *_LIKE[8:]), (*reversed(_LIKE[:8]), *_LIKE[8:]))
FAULTS = [
    _fault("chunk-own-tokens-only", "A later chunk does not see the cache.", _masked(_own_only),
           "only the tokens of its own step", _ATTENTION, _SECOND_CHUNK, _CHUNKED),
    _fault("chunk-own-tokens-only-in-bfloat16", "A later chunk does not see the cache.", _masked(_own_only),
           "only the tokens of its own step", _ATTENTION, _SECOND_CHUNK, _CHUNKED, _BF16),
    _fault("chunk-old-tokens-only", "A later chunk sees nothing but the cache.",
           _masked(lambda mask, num_old: mask & (torch.arange(mask.shape[1]) < num_old)),
           "does not see the tokens of its own step", _ATTENTION, _SECOND_CHUNK, _CHUNKED),
    _fault("chunk-not-causal", "A later chunk has no causal mask.",
           _masked(lambda mask, num_old: torch.ones_like(mask)), "no causal mask", _ATTENTION,
           _SECOND_CHUNK, _CHUNKED, _BF16),
    _fault("chunk-sees-the-next", "In a later chunk a row sees the token after it.", _masked(_sees_the_next),
           "sees the next token", _ATTENTION, _SECOND_CHUNK, _CHUNKED),
    _fault("chunk-boundary-unseen", "A later chunk does not see the last token of the chunk before.",
           _masked(lambda mask, num_old: mask & (torch.arange(mask.shape[1]) != num_old - 1)),
           "the last token of the step before", _ATTENTION, _SECOND_CHUNK, _CHUNKED),
    _fault("chunk-first-unseen", "A later chunk does not see its request's first token.",
           _masked(lambda mask, num_old: mask & (torch.arange(mask.shape[1]) > 0)),
           "first 1 token", _ATTENTION, _SECOND_CHUNK, _CHUNKED, _BF16),
    _fault("chunk-scale-missing", "A later chunk does not scale its scores.",
           _masked(lambda mask, num_old: mask, scale=1.0), "scale is missing", _ATTENTION, _SECOND_CHUNK, _CHUNKED),
    _fault("chunk-heads-tiled", "A later chunk reads KV head i modulo their number.",
           _masked(lambda mask, num_old: mask, heads=tiled), "tiled", _ATTENTION, _SECOND_CHUNK, _CHUNKED, _BF16),
    _fault("chunk-parts-averaged", "Old and own keys of a chunk are attended to apart, and averaged.",
           _in_two_parts(_averaged), "averaged", _ATTENTION, _SECOND_CHUNK, _CHUNKED),
    _fault("chunk-parts-in-base-two", "Old and own keys of a chunk are merged with logarithms of base two.",
           _in_two_parts(_in_base_two), "merged in base 2", _ATTENTION, _SECOND_CHUNK, _CHUNKED, _BF16),
    _fault("chunk-old-keys-in-fp8", "What a chunk reads of earlier ones was kept in float8.",
           _later_chunks(_old_in_fp8), "lower dtype: float8_e4m3fn", _ATTENTION, _SECOND_CHUNK, _CHUNKED, _BF16),
    _fault("chunk-padding-attended", "The keys of a chunk are padded to a multiple of 16, and the padding is seen.",
           replacing((reference_engine.attention.paged, "attend_chunk", _padded_keys)), "padding is attended to",
           _ATTENTION, (0, 0), _CHUNKED),
    _fault("chunk-window-ignored", "Later chunks have no sliding window.",
           replacing((reference_engine.attention.paged, "attend_chunk", _wider_window)), "window.*first row",
           _ATTENTION, (0, 16), _CHUNKED, setting=WINDOWED),
    _fault("chunk-position-plus-one", "Positions of later chunks are one too high.",
           positions_changed(lambda at, chunks: at + per_row(chunks, lambda chunk: int(_is_later(chunk)))),
           r"off by one \(\+1\)", _Q_ROPE, _SECOND_CHUNK, _CHUNKED, _FP16),
    _fault("chunk-position-of-the-batch", "The rows before a chunk in its step are added to its positions.",
           positions_changed(_shifted_by_the_batch), "before it in the (batch|step)", _Q_ROPE, (1, 0), _MIXED),
    _fault("chunk-slots-from-zero", "A later chunk is written from its request's first slot on.",
           _in_zeroed_memory(_batches(_slots_from_zero)), "another position.*wrong slot|positions away.*wrong slot",
           _K_CACHE, (0, 0), _CHUNKED),
    _fault("chunk-last-row-not-stored", "The last row of a chunk is not stored.",
           _in_zeroed_memory(_batches(_last_row_nowhere)), "zeros come back", _K_CACHE, (0, CHUNK - 1), _CHUNKED,
           _BF16),
    _fault("chunk-stale-table", "Attention of a later chunk goes by the block table before it.",
           _in_zeroed_memory(_batches(_stale_table)),
           "block table of the step before", _ATTENTION, (0, BLOCK_SIZE), _CHUNKED),
    _fault("chunk-norm-skipped", "Later chunks leave q and k as they are projected.",
           replacing((Attention, "_project", _unnormed_later)), "norm is skipped", _Q_NORM, _SECOND_CHUNK, _CHUNKED,
           _BF16),
    _fault("hit-positions-restart", "After a prefix hit, positions start at 0 again.", positions_changed(_restarting),
           "offset is forgotten", _Q_ROPE, _BEHIND_THE_HIT, _PREFIX),
    _fault("hit-positions-restart-in-bfloat16", "After a prefix hit, positions start at 0 again.",
           positions_changed(_restarting), "offset is forgotten", _Q_ROPE, _BEHIND_THE_HIT, _PREFIX, _BF16),
    _fault("hit-not-read", "What a prefix hit found is not attended to.", _masked(_own_only),
           "only the tokens of its own step", _ATTENTION, _BEHIND_THE_HIT, _PREFIX),
    _fault("hit-mask-top-left", "After a prefix hit the mask is aligned with the first key.", _masked(_top_left),
           "top-left", _ATTENTION, _BEHIND_THE_HIT, _PREFIX, _FP16),
    _fault("hit-parts-averaged", "Cached and own keys are attended to apart, and averaged.", _in_two_parts(_averaged),
           "averaged", _ATTENTION, _BEHIND_THE_HIT, _PREFIX, _BF16),
    _fault("hit-table-reversed", "The blocks of a prefix hit are in the reverse order.",
           replacing((BlockManager, "take_prefix", _table_reversed)), "another position|reverse order", _K_CACHE,
           (3, 0), _PREFIX),
    _fault("hit-one-token-too-many", "A prefix hit counts one token more than it has.",
           _in_zeroed_memory((BlockManager, "take_prefix", _one_token_too_many)), "zeros come back|never written",
           _K_CACHE, (2, 16), _PREFIX, prompts=(tuple(range(40, 61)), tuple(range(70, 91)))),
    _fault("hit-logits-of-the-first-row", "After a prefix hit the first row is sampled from.",
           replacing(_batches(_logits_of_the_first_row)), "another token, the first one of its step", "lm_head",
           (3, 36), _PREFIX),
    _fault("hash-without-last-token", "The last token of a block is not hashed.",
           prefixes_changed(_without_last_token, _has_same_key), "another request wrote",
           _K_CACHE, (1, 7), _PREFIX, prompts=_LAST_DIFFERS),
    _fault("hash-without-last-token-in-bfloat16", "The last token of a block is not hashed.",
           prefixes_changed(_without_last_token, _has_same_key), "another request wrote",
           _K_CACHE, (1, 7), _PREFIX, _BF16, prompts=_LAST_DIFFERS),
    _fault("hash-without-order", "The tokens of a block are hashed without their order.",
           prefixes_changed(_without_order, _has_same_key), "another request wrote",
           _K_CACHE, (1, 0), _PREFIX, _FP16, prompts=_REORDERED),
    _fault("fork-copies-keys-only", "A fork that writes into a shared block copies its keys and not its values.",
           _copied(_keys_copied_only), "zeros come back", "model.layers.0.v_cache", (0, 32), "forked"),
    _fault("fork-copies-first-layer-only", "A fork copies a shared block in the first layer alone.",
           _copied(_first_layer_copied_only), "zeros come back", "model.layers.1.k_cache", (0, 32), "forked", _BF16),
    _fault("resumed-position-plus-one", "A preempted request that comes back starts at position 1.",
           positions_changed(_resumed_plus_one), r"off by one \(\+1\)", _Q_ROPE, (_PREEMPTED, 0), _AGAIN),
    _fault("resumed-position-plus-one-in-bfloat16", "A preempted request that comes back starts at position 1.",
           positions_changed(_resumed_plus_one), r"off by one \(\+1\)", _Q_ROPE, (_PREEMPTED, 0), _AGAIN, _BF16),
    _fault("resumed-behind-its-past", "A preempted request that comes back starts after its prompt.",
           positions_changed(_resumed_behind_its_past), r"off by \+21", _Q_ROPE, (_PREEMPTED, 0), _AGAIN, _FP16),
    _fault("resumed-first-token-lost", "A preempted request starts again after its first token.",
           replacing((BlockManager, "release", _first_token_taken_for_computed)), "another position.*not written",
           _K_CACHE, (_PREEMPTED, 0), _AGAIN),
]  # fmt: skip
