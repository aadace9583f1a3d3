"""One batch for an attention function: its shapes, where its blocks lie, its tensors from a seed, and how it is drawn.

Shapes: T rows of all requests one after the other, N query heads, K KV heads, H head dim, B blocks, S slots in a block.
"""


# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The arguments of `attend`."""

    q_TNH: torch.Tensor
    k_cache_BSKH: torch.Tensor
    v_cache_BSKH: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """A batch, small enough to be printed."""

    dtype: str
    num_kv_heads: int
    group_size: int
    """Query heads of one KV head."""
    head_dim: int
    block_size: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_shared_blocks: int = 0
    """Leading blocks that later requests share with the first, as far as both fill them."""
    scale: float | None = None
    """None: 1 / sqrt(H)."""
    window: int | None = None
    softcap: float | None = None
    num_splits: int | None = None
    seed: int = 0
    """Seed of the tensors."""
    placement: int = 0
    """Seed of the order of the physical blocks; 0: as they are needed."""
    query_level: float = 1.0
    """Standard deviation of the queries."""
    score_level: float = 1.0
    """Standard deviation of the scores, which gives that of the keys."""
    value_level: float = 1.0
    garbage: float = math.nan
    """Content of the unallocated slots."""
    device: str = "cpu"

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group_size

    @property
    def num_rows(self) -> int:
        """Rows of all requests."""
        return sum(self.query_lens)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def true_scale(self) -> float:
        """The factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def key_level(self) -> float:
        """Standard deviation of the keys."""
        spread = 1.0 if self.scale is None else self.scale * math.sqrt(self.head_dim)
        return self.score_level / (self.query_level * spread)

    @property
    def num_blocks(self) -> int:
        """Number of physical blocks. One of them is in no block table."""
        return 1 + sum(-(-context_len // self.block_size) for context_len in self.context_lens)

    @property
    def order(self) -> list[int]:
        """The pool's index of each block, in the order in which they are needed."""
        order = list(range(self.num_blocks))
        if self.placement:
            random.Random(self.placement).shuffle(order)
        return order

    @property
    def block_tables(self) -> list[list[int]]:
        """Physical blocks of each request."""
        free, tables = iter(self.order), list[list[int]]()
        for context_len in self.context_lens:
            shared = min(self.num_shared_blocks, *map(self._num_full_past, (0, len(tables)))) if tables else 0
            num_own = -(-context_len // self.block_size) - shared
            tables.append([*(tables[0][:shared] if tables else []), *(next(free) for _ in range(num_own))])
        return tables

    def _num_full_past(self, request: int) -> int:
        """Count the blocks that were full before this step."""
        return max(0, self.context_lens[request] - self.query_lens[request]) // self.block_size

    @property
    def options(self) -> dict[str, Any]:
        """The optional parameters of `attend` that are set."""
        named = {name: getattr(self, name) for name in ("scale", "window", "softcap", "num_splits")}
        return {name: value for name, value in named.items() if value is not None}

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield request, row and position of every row."""
        row = 0
        for request, (query_len, context_len) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            for position in range(context_len - query_len, context_len):
                yield request, row, position
                row += 1

    def owned_slots(self) -> torch.Tensor:
        """Return [B, S] bool: the slots of some request's positions."""
        owned_BS = torch.zeros(self.num_blocks, self.block_size, dtype=torch.bool)
        for table, context_len in zip(self.block_tables, self.context_lens, strict=True):
            for i in range(context_len):
                owned_BS[table[i // self.block_size], i % self.block_size] = True
        return owned_BS

    def tensors(self) -> Tensors:
        """Make the tensors. K and V are drawn in the order of need: another placement moves them, and changes none."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int, level: float) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * level).to(self.torch_dtype)

        cache_shape = (self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        q_TNH = draw(self.num_rows, self.num_heads, self.head_dim, level=self.query_level)
        k_BSKH, v_BSKH = draw(*cache_shape, level=self.key_level), draw(*cache_shape, level=self.value_level)
        k_cache_BSKH, v_cache_BSKH = torch.empty_like(k_BSKH), torch.empty_like(v_BSKH)
        k_cache_BSKH[self.order], v_cache_BSKH[self.order] = k_BSKH, v_BSKH
        is_free_BS = ~self.owned_slots()
        k_cache_BSKH[is_free_BS] = v_cache_BSKH[is_free_BS] = self.garbage
        return Tensors(
            q_TNH=q_TNH.to(self.device),
            k_cache_BSKH=k_cache_BSKH.to(self.device),
            v_cache_BSKH=v_cache_BSKH.to(self.device),
        )


DTYPES = ("float32", "bfloat16", "float16")
HEAD_DIMS = (8, 16, 2, 3, 32, 64, 80, 128)
BLOCK_SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 32)
GROUP_SIZES = (1, 2, 3, 4, 7, 8)
LEVELS = {"float32": 60, "bfloat16": 60, "float16": 12}
"""Powers of two up to which queries, keys and values go. In float32 and bfloat16 products and sums of such values still
fit into float32, which any kernel sums in; float16 goes up to a few times below its largest number, 65504."""
SCORE_LEVELS = (1.0, 0.0, 0.01, 8.0, 300.0, 10000.0)
"""Up to 10,000: products of float16 queries and keys are then beyond 65504, as are their sums."""
MOST_ROUNDED_SCORE = 8.0
"""The largest score if scores are rounded to the dtype: larger ones leave nothing of the softmax."""

LONGEST_CONTEXT = 90
MOST_REQUESTS = 5
TILE = 16
"""Keys of the smallest tile that kernels compute in: some contexts fill their last tile, where few would by chance."""

GARBAGE = (math.nan, 100.0, math.inf)
"""Content of unallocated slots."""

FOCUSES = {
    "any": "batches of any kind",
    "multi-head": "as many KV heads as query heads",
    "multi-query": "one KV head",
    "grouped-query": "several query heads on each of several KV heads",
    "decode": "one row for each request",
    "chunk": "fewer rows than keys, and more than one",
    "whole": "as many rows as keys",
    "slots": "blocks of one token",
    "shared prefix": "blocks in several tables",
    "magnitude": "values up to the edge of the dtype",
    "scale": "another scale",
    "window": "a sliding window",
    "soft cap": "scores that are capped",
    "split": "keys cut into parts",
    "masked rows": "requests without keys",
}
"""Kinds of batches, each searched by itself."""

KEYWORD_OF = {"scale": "scale", "window": "window", "soft cap": "softcap", "split": "num_splits"}
"""The parameter of `attend` that a kind of batches needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The inputs that the function under test accepts."""

    dtypes: Sequence[str] = DTYPES
    head_dims: Sequence[int] = HEAD_DIMS
    block_sizes: Sequence[int] = BLOCK_SIZES
    group_sizes: Sequence[int] = GROUP_SIZES
    longest_context: int = LONGEST_CONTEXT
    most_requests: int = MOST_REQUESTS
    device: str = "cpu"
    keywords: frozenset[str] = frozenset()
    hides_keywords: bool = False
    """Whether there may be more parameters, because of `**kwargs` or an unreadable signature."""
    rounds_scores: bool = False
    has_masked_rows: bool = False

    def refusal(self, focus: str) -> str | None:
        """Return why a focus of `FOCUSES` cannot be checked; None if it can."""
        keyword = KEYWORD_OF.get(focus)
        if keyword is not None and keyword not in self.keywords:
            if self.hides_keywords:
                return f"the signature of attend hides its parameters; say keywords = ({keyword!r},) if it takes it"
            return f"attend has no parameter {keyword}"
        if focus == "masked rows" and not self.has_masked_rows:
            return "it does not declare serves_masked_rows"
        if focus == "slots" and 1 not in self.block_sizes:
            return "it does not serve block size 1"
        if (focus == "grouped-query" and max(self.group_sizes) == 1) or (
            focus == "multi-head" and 1 not in self.group_sizes
        ):
            return f"it serves group sizes {', '.join(map(str, self.group_sizes))}"
        return None


_NIGHTLY_HEAD_DIMS = (40, 48, 56, 72, 96, 112, 160, 192, 256)
_NIGHTLY_BLOCK_SIZES = (6, 12, 24, 48, 64, 96, 128, 256)
_NIGHTLY_GROUP_SIZES = (5, 6, 9, 10, 12, 14, 16)
_NIGHTLY_CONTEXTS = (2_000, 4_000)
"""The range of tokens in all requests of a batch, of which there are 2 to 40."""


def sizes_of(served: Served, seed: int) -> Served:
    """Return other sizes for what the function under test does not declare: one of each, drawn by a seed."""
    generator, fixed = random.Random(seed), Served()

    def one_of(declared: Sequence[int], default: Sequence[int], others: Sequence[int]) -> Sequence[int]:
        drawn = generator.choice((generator.choice(others), generator.randrange(1, others[-1] + 1)))
        return declared if declared != default else (drawn,)

    most_requests = generator.choice((2, 3, 8, 20, 40))
    return replace(
        served,
        head_dims=one_of(served.head_dims, fixed.head_dims, _NIGHTLY_HEAD_DIMS),
        block_sizes=one_of(served.block_sizes, fixed.block_sizes, _NIGHTLY_BLOCK_SIZES),
        group_sizes=one_of(served.group_sizes, fixed.group_sizes, _NIGHTLY_GROUP_SIZES),
        longest_context=generator.randrange(*_NIGHTLY_CONTEXTS) // most_requests,
        most_requests=most_requests,
    )


def batches(served: Served, focus: str = "any") -> SearchStrategy[AttentionCase]:
    """Return batches of a kind (a key of `FOCUSES`) that the function under test serves."""
    return _batches(served, focus)


@st.composite
def _batches(draw: DrawFn, served: Served, focus: str) -> AttentionCase:
    least = 2 if focus == "shared prefix" else 1
    lengths = draw(st.lists(_lengths(focus, served.longest_context), min_size=least, max_size=served.most_requests))
    query_lens, context_lens = zip(*lengths, strict=True)
    dtype, head_dim = draw(st.sampled_from(served.dtypes)), draw(st.sampled_from(served.head_dims))
    num_kv_heads, group_size = draw(_heads(served, focus))
    scale = draw(_option(served, focus, "scale", st.sampled_from((1.0, 0.25, 0.01))))
    spread = 1.0 if scale is None else scale * math.sqrt(head_dim)
    has_levels = focus in ("any", "magnitude")
    query, score, value = draw(_levels(served, dtype, spread)) if has_levels else (1.0, 1.0, 1.0)
    return AttentionCase(
        dtype=dtype,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        block_size=1 if focus == "slots" else draw(st.sampled_from(served.block_sizes)),
        query_lens=query_lens,
        context_lens=context_lens,
        num_shared_blocks=draw(st.integers(1 if focus == "shared prefix" else 0, 4)),
        scale=scale,
        window=draw(_option(served, focus, "window", st.integers(1, max(1, *context_lens)))),
        softcap=draw(_option(served, focus, "soft cap", st.sampled_from((30.0, 50.0, 1.0)))),
        num_splits=draw(_option(served, focus, "split", st.integers(2, 8))),
        seed=draw(st.integers(0, 99)),
        placement=draw(st.integers(0, 99)),
        query_level=query,
        score_level=score,
        value_level=value,
        garbage=draw(st.sampled_from(GARBAGE)),
        device=served.device,
    )


def _option(served: Served, own_focus: str, focus: str, values: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """Return values of a focus's parameter: always for that focus, sometimes for all kinds together."""
    if KEYWORD_OF[focus] not in served.keywords or own_focus not in ("any", focus):
        return st.none()
    return values if own_focus == focus else st.none() | values


@st.composite
def _lengths(draw: DrawFn, focus: str, most: int) -> tuple[int, int]:
    """Draw the rows and the positions of a request."""
    if focus == "masked rows" and draw(st.booleans()):
        return 1, 0
    # Mostly short: a mistake at a block boundary shows at the first one.
    # The ranges are nested, so that a long context can be made shorter step by step.
    longest_context = draw(st.sampled_from((24, most)))
    context_len = draw(st.integers(3 if focus == "chunk" else 1, longest_context))
    if draw(st.sampled_from((False, False, False, True))):
        context_len = -(-context_len // TILE) * TILE
    longest = min(context_len, 24)
    query_lens = {
        "decode": st.just(1),
        "whole": st.just(context_len),
        "chunk": st.integers(2, max(2, min(context_len - 1, 24))),
    }
    return draw(query_lens.get(focus, st.just(1) | st.integers(1, longest))), context_len


@st.composite
def _heads(draw: DrawFn, served: Served, focus: str) -> tuple[int, int]:
    """Draw the KV heads, and the query heads of each."""
    group_sizes = [size for size in served.group_sizes if size > 1 or focus != "grouped-query"]
    group_size = 1 if focus == "multi-head" else draw(st.sampled_from(group_sizes))
    if focus == "multi-query":
        return 1, group_size
    return draw(st.integers(2 if focus in ("grouped-query", "multi-head") else 1, 3)), group_size


@st.composite
def _levels(draw: DrawFn, served: Served, dtype: str, spread: float) -> tuple[float, float, float]:
    """Draw the standard deviations of queries, scores and values; scores are `spread` times queries times keys."""
    largest = LEVELS[dtype]
    scores = [level for level in SCORE_LEVELS if level <= MOST_ROUNDED_SCORE or not served.rounds_scores]
    score = draw(st.sampled_from(scores))
    least = -largest if score == 0 else max(-largest, math.ceil(math.log2(score / spread)) - largest)
    query = draw(st.just(max(least, 0)) | st.integers(least, largest))
    return 2.0**query, score, 2.0 ** draw(st.just(0) | st.integers(-largest, largest))
