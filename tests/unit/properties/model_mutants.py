"""Small changes to the reference engine's attention, rotary embedding, norm and sampler: bugs that engines have had."""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from harness.properties.attention.cache import check_read_back, check_store
from harness.properties.attention.suite import check_definition
from harness.properties.engine.suite import check_engine
from harness.properties.ops.norm import check_norms
from harness.properties.ops.rotary import check_rotary
from harness.properties.ops.tokens import check_sampling
from harness.properties.reference.attention import PagedSubject
from harness.properties.reference.engine import EngineSubject
from harness.properties.reference.ops import Ops
from reference_engine import batch, block_manager, kv_cache, layers, rope_types, rotary, sampler
from reference_engine import model_runner as runner
from reference_engine.attention import contiguous, paged, recompute, sdpa

Suite = Callable[[Any], None]
"""Takes Hypothesis settings, and raises what it finds."""


def attention(focus: str) -> Suite:
    return lambda settings: check_definition(PagedSubject, settings, focus)


def cache(check: Any) -> Suite:
    return lambda settings: check(PagedSubject, settings)


def operation(check: Any) -> Suite:
    return lambda settings: check(Ops, settings)


def engine(relation: str) -> Suite:
    return lambda settings: check_engine(EngineSubject, settings, relation)


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    holders: tuple[Any, ...]
    """Modules or a class that hold the function."""
    function: str
    old: str
    new: str
    suite: Suite
    killed_by: str | tuple[str, ...] = "attention equals its definition"
    """Beginning of the property that is to be named; of one of them, where it depends on the example."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Change the function wherever it is held, and put it back."""
        original = inspect.getattr_static(self.holders[0], self.function)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, f"{self.function} has {source.count(self.old)} times: {self.old}"
        namespace: dict[str, Any] = {}
        changed = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(changed, original.__globals__, namespace)
        with pytest.MonkeyPatch.context() as patch:
            for holder in self.holders:
                patch.setattr(holder, self.function, namespace[self.function])
            yield


STORE, ROTARY, NORMS, SAMPLING = cache(check_store), *map(operation, (check_rotary, check_norms, check_sampling))
CHUNKS = (sdpa, paged, contiguous, recompute)
SINGLE = (sdpa, paged)
STORED = "what is stored lies in its slot bit for bit"
READ = "what is read back is what the slots hold"
SETS = "a sampled token is in the set"
OFTEN = "tokens come as often as is likely"
ANY_OF_BOTH = (SETS, OFTEN)
DEFINED = "a rotation turns pair i by position * theta^(-2i/H)"

MUTANTS = [
    # Attention over blocks
    Mutant("mask aligned at the top left", CHUNKS, "attend_chunk", "1 < num_rows < context_len", "False",
           attention("chunk")),
    Mutant("scale missing", CHUNKS, "attend_chunk", "q_TNH.shape[-1] ** -0.5", "1.0", attention("whole")),
    Mutant("scale of all heads together (mlc-llm#3426)", CHUNKS, "attend_chunk", "q_TNH.shape[-1] ** -0.5",
           "q_TNH[0].numel() ** -0.5", attention("multi-head")),
    Mutant("window one token longer (transformers#39408)", (sdpa,), "_band", "> positions_T1 - window",
           ">= positions_T1 - window", attention("window")),
    Mutant("window misses its first key", SINGLE, "first_key", "- window + 1", "- window + 2", attention("window")),
    Mutant("no window in decode", (paged.PagedAttention,), "_plan_single", "window is None or max(lens) <= window",
           "True", attention("window")),
    Mutant("KV heads tiled (jax-js#180)", SINGLE, "attend_single",
           "q_RNH.reshape(num_requests, num_kv_heads, -1, head_dim)",
           "q_RNH.reshape(num_requests, -1, num_kv_heads, head_dim).transpose(1, 2)", attention("grouped-query")),
    Mutant("keys read past the end", (paged.PagedAttention,), "_gather_blocks", "single.padding is not None", "False",
           attention("decode")),
    Mutant("padding attended to", (paged.PagedAttention,), "_whole_past", "min(lens) < max_len", "False",
           attention("decode")),
    Mutant("padding of a window not replaced", (paged.PagedAttention,), "_plan_single",
           "slots_RC = slots_RC.masked_fill(~is_key_RC, NULL_BLOCK)", "pass", attention("window")),
    Mutant("block table of the next request", (paged.PagedAttention,), "_chunk_slots",
           "batch.block_tables_RB[index : index + 1]", "batch.block_tables_RB.roll(1, 0)[index : index + 1]",
           attention("chunk")),
    Mutant("slots of a block backwards", (kv_cache, paged), "context_slots", "* block_size + offsets_S",
           "* block_size + offsets_S.flip(0)", attention("chunk")),
    Mutant("block off by one at a boundary", (kv_cache, paged), "context_slots", "positions_RC // block_size)",
           "(positions_RC - 1).clamp(min=0) // block_size)", attention("window")),
    # The cache
    Mutant("K stored in place of V", (kv_cache.KVCache,), "store", "(layer, 1, v_TKH)", "(layer, 1, k_TKH)", STORE,
           STORED),
    Mutant("last row not stored", (kv_cache.KVCache,), "store", "(0, slots_T, self._as_stored(layer, 0, k_TKH))",
           "(0, slots_T[:-1], self._as_stored(layer, 0, k_TKH[:-1]))", STORE, STORED),
    Mutant("K kept in a lower dtype", (kv_cache.KVCache,), "store", "(layer, 0, k_TKH)",
           "(layer, 0, k_TKH.bfloat16().to(k_TKH.dtype))", STORE, STORED),
    Mutant("V read where K lies", (kv_cache.KVCache,), "gather", "self._v[layer].index_select",
           "self._k[layer].index_select", cache(check_read_back), READ),
    # Rotary embedding
    Mutant("interleaved pairs (shainet#111)", (rotary,), "rotate_half", "x_TNH.chunk(2, dim=-1)",
           "x_TNH[..., ::2], x_TNH[..., 1::2]", ROTARY, "a rotation keeps the length of every pair"),
    Mutant("one sign lost", (rotary,), "rotate_half", "cat((-b, a)", "cat((b, a)", ROTARY,
           "a rotation keeps the length of every pair"),
    Mutant("turned the other way", (rotary,), "rotate_half", "cat((-b, a)", "cat((b, -a)", ROTARY, DEFINED),
    Mutant("position one too high", (rotary.RotaryEmbedding,), "_turn", "positions_T[:, None].float()",
           "(positions_T[:, None] + 1).float()", ROTARY, "position 0 is not rotated"),
    Mutant("positions in bfloat16", (rotary.RotaryEmbedding,), "_turn", "positions_T[:, None].float()",
           "positions_T[:, None].bfloat16().float()", ROTARY, "rotating by m, then by n"),
    Mutant("frequencies of half the heads' width", (rope_types,), "_wavelengths", "/ head_dim", "/ (head_dim // 2)",
           ROTARY, DEFINED),
    # RMSNorm
    Mutant("mean squares in the dtype (sglang#27540)", (layers.RMSNorm,), "__call__", "x_TX.to(torch.float32)", "x_TX",
           NORMS, "rms_norm: "),
    Mutant("another eps (llama.cpp#2373)", (layers.RMSNorm,), "__call__", "self.eps", "10 * self.eps", NORMS,
           "rms_norm: each row"),
    Mutant("eps outside of the root", (layers.RMSNorm,), "__call__", "mean(-1, keepdim=True) + self.eps)",
           "mean(-1, keepdim=True)) / (1 + self.eps)", NORMS, "rms_norm: "),
    Mutant("weight plus one", (layers.RMSNorm,), "__call__", "self.weight_X *", "(1 + self.weight_X) *", NORMS,
           "rms_norm: each row"),
    Mutant("normalised in place (nano-vllm#170)", (layers.RMSNorm,), "__call__", "x32 * torch.rsqrt(", "x32.mul_(",
           NORMS, "rms_norm: the input is left as it is"),
    Mutant("magnitudes instead of numbers", (layers.RMSNorm,), "__call__", "normed = x32 *", "normed = x32.abs() *",
           NORMS, "rms_norm: negating"),
    # Sampler
    Mutant("top-k off by one", (sampler,), "allowed_tokens", "< top_k_R[:, None]", "<= top_k_R[:, None]", SAMPLING,
           SETS),
    Mutant("top-p ignored", (sampler,), "allowed_tokens", "(before_RV < top_p_R[:, None])", "(before_RV < 2)", SAMPLING,
           SETS),
    Mutant("top-p without the token that crosses it", (sampler,), "allowed_tokens", "cumsum(dim=-1) - probs_RV",
           "cumsum(dim=-1)", SAMPLING, ANY_OF_BOTH),
    Mutant("top-p of all tokens, not of the top k", (sampler,), "allowed_tokens",
           ".masked_fill(~is_top_RV, -torch.inf)", "", SAMPLING, ANY_OF_BOTH),
    Mutant("min-p ignored", (sampler,), "allowed_tokens", "+ min_p_R.log()[:, None]", "- torch.inf", SAMPLING, SETS),
    Mutant("temperature multiplied", (sampler,), "_draw", "scores_RV = scores_RV /", "scores_RV = scores_RV *",
           SAMPLING, ANY_OF_BOTH),
    Mutant("temperature 0 not greedy", (sampler,), "choose", "asked.temperature > 0 for", "True for",
           SAMPLING, SETS),
    Mutant("draws depend on the place in the batch (vllm#51226)", (sampler,), "_draw",
           "uniforms(seeds, num_sampled)", "uniforms(range(len(sequences)), num_sampled)", SAMPLING,
           "a request draws the same in any batch"),
    Mutant("numbers from half of the range", (sampler,), "uniforms", "/ 2**52", "/ 2**53", SAMPLING, OFTEN),
    # The whole engine
    Mutant("chunk offset forgotten (mlx-node#33)", (batch,), "_rows", "(starts_R - first_rows_R)",
           "(0 * starts_R - first_rows_R)", engine("chunks"), "what an engine computes"),
    Mutant("positions run on into the next request", (batch,), "_rows", "- first_rows_R", "", engine("batch"),
           "what an engine computes"),
    Mutant("logits of the first row of a chunk", (runner, batch), "build_batch", "rows = sampled_rows(chunks)",
           "rows = [max(0, row - 1) for row in sampled_rows(chunks)]", engine("chunks"), "what an engine computes"),
    Mutant("cached prefix counted a token too long", (block_manager.BlockManager,), "take_prefix",
           "sequence.num_tokens - 1", "sequence.num_tokens", engine("prefix hit"), "what an engine computes"),
]  # fmt: skip

SURVIVORS = [
    # Not a bug: the weight multiplied before the cast rounds once where the definition allows two.
    Mutant("weight before the cast (vllm#42325)", (layers.RMSNorm,), "__call__",
           "self.weight_X * normed.to(x_TX.dtype)", "(self.weight_X * normed).to(x_TX.dtype)", NORMS, ""),
    # One number in 2^52 lies on an edge: no test of drawn tokens can see on which side it falls.
    Mutant("the edge of a token's share belongs to the one before", (sampler,), "_draw", "right=True", "right=False",
           SAMPLING, ""),
    # Which of two equally likely tokens is in the set is anybody's choice.
    Mutant("equal scores in any order", (sampler,), "allowed_tokens", "stable=True", "stable=False", SAMPLING, ""),
    # Padding reads the null block's zeros under a mask: which of its slots is read does not matter.
    Mutant("padding of a window reads another slot of the null block", (paged.PagedAttention,), "_plan_single",
           "masked_fill(~is_key_RC, NULL_BLOCK)", "masked_fill(~is_key_RC, self.block_size - 1)", attention("window"),
           ""),
]  # fmt: skip
"""Mutants that no property kills, and why."""
