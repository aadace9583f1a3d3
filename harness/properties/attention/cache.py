"""Properties of a KV cache's store and read-back: every bit arrives where its slot says, and nothing else changes.

Shapes: T rows, C context tokens, K KV heads, H head dim, B blocks, S slots in a block.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from harness.properties.attention.case import Served
from harness.properties.attention.subject import AttentionUnderTest
from harness.properties.core.falsify import calling, falsify
from harness.properties.core.findings import Counterexample, Rejections

_WORDS = {"float32": torch.int32, "bfloat16": torch.int16, "float16": torch.int16}
"""Integers as wide as each dtype: equality of bits, NaN and signed zeros among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCase:
    """A cache of random bits, and slots in it."""

    dtype: str
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    slots: tuple[int, ...]
    """The slot of each row; the adapter's `pad_slot` for rows that are not stored."""
    seed: int
    device: str

    def bits(self, *leading: int, stream: int) -> torch.Tensor:
        """Return random bits as numbers of the dtype."""
        word, generator = _WORDS[self.dtype], torch.Generator().manual_seed(4 * self.seed + stream)
        info = torch.iinfo(word)
        shape = (*leading, self.num_kv_heads, self.head_dim)
        drawn = torch.randint(info.min, info.max + 1, shape, generator=generator, dtype=torch.int64).to(word)
        return drawn.view(getattr(torch, self.dtype)).to(self.device)

    def caches(self) -> list[torch.Tensor]:
        """Return K and V caches, each [B, S, K, H]."""
        return [self.bits(self.num_blocks, self.block_size, stream=stream) for stream in (0, 1)]

    def lines(self) -> list[str]:
        """Return a program's lines that make `k_cache` and `v_cache` of these bits, by a function `bits`."""
        word = str(_WORDS[self.dtype])
        info = torch.iinfo(_WORDS[self.dtype])
        return [
            "",
            "def bits(*shape, seed):",
            "    generator = torch.Generator().manual_seed(seed)",
            f"    words = torch.randint({info.min}, {info.max + 1}, shape, generator=generator, dtype=torch.int64)",
            f'    return words.to({word}).view(torch.{self.dtype}).to("{self.device}")',
            "",
            *(
                f"{name} = bits({self.num_blocks}, {self.block_size}, {self.num_kv_heads}, {self.head_dim}, "
                f"seed={4 * self.seed + stream})"
                for stream, name in enumerate(("k_cache", "v_cache"))
            ),
        ]


def check_store(named: Any, settings: Settings) -> Rejections:
    """Check that `store` writes each row to its slot, and nothing else; nothing is checked without it.

    Raises:
        PropertyError: a slot holds other bits.
        HarnessError: BAD_ADAPTER.
    """
    target = AttentionUnderTest(named)
    if not target.offers("store"):
        return Rejections()
    pad_slot = target.declares("pad_slot")

    def check(case: CacheCase) -> None:
        caches, expected = case.caches(), case.caches()
        rows = [case.bits(len(case.slots), stream=stream) for stream in (2, 3)]
        with calling("store", lambda: _store_program(target, case)):
            target.adapter.store(*rows, torch.tensor(case.slots, device=case.device), *caches)
        for name, actual, wanted, bits in zip("KV", caches, expected, rows, strict=True):
            for row, slot in enumerate(case.slots):
                if slot != pad_slot:
                    wanted[slot // case.block_size, slot % case.block_size] = bits[row]
            wrong_BS = _differs(case, actual, wanted).flatten(2).any(dim=-1)
            if wrong_BS.any():
                block, offset = (int(i) for i in wrong_BS.nonzero()[0])
                slot = block * case.block_size + offset
                written = f"what row {case.slots.index(slot)} has" if slot in case.slots else "what it held before"
                raise Counterexample(
                    f"{name} in slot {slot} is not {written}", _store_program(target, case, name.lower(), slot)
                )

    return falsify("what is stored lies in its slot bit for bit", check, _stores(target.served, pad_slot), settings)


def check_read_back(named: Any, settings: Settings) -> Rejections:
    """Check that `read_back` returns the bits of a block table's slots; nothing is checked without it.

    Raises:
        PropertyError: it returns others.
        HarnessError: BAD_ADAPTER.
    """
    target = AttentionUnderTest(named)
    if not target.offers("read_back"):
        return Rejections()

    def check(drawn: tuple[CacheCase, list[int], int]) -> None:
        case, table, num_tokens = drawn
        opening = ["import torch", *target.opening(), *case.lines()]
        call = f"k, v = {target.name}.read_back(k_cache, v_cache, {table}, {num_tokens})"
        caches = case.caches()
        with calling("read_back", lambda: "\n".join([*opening, call]) + "\n"):
            read = target.adapter.read_back(*caches, table, num_tokens)
        for name, actual, cache in zip("kv", read, caches, strict=True):
            wanted = torch.stack([cache[table[i // case.block_size], i % case.block_size] for i in range(num_tokens)])
            if actual.shape != wanted.shape or _differs(case, actual, wanted).any():
                ending = [
                    f"slots = {[(table[i // case.block_size], i % case.block_size) for i in range(num_tokens)]}",
                    f"expected = torch.stack([{name}_cache[block, offset] for block, offset in slots])",
                    f"assert torch.equal({name}.view({_WORDS[case.dtype]}), expected.view({_WORDS[case.dtype]}))",
                ]
                raise Counterexample(f"{name.upper()} of {num_tokens} positions is not what their slots hold",
                             "\n".join([*opening, call, *ending]) + "\n")  # fmt: skip

    return falsify("what is read back is what the slots hold, bit for bit", check, _tables(target.served), settings)


def _differs(case: CacheCase, actual: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    word = _WORDS[case.dtype]
    return actual.contiguous().view(word) != wanted.contiguous().view(word)


def _store_program(target: AttentionUnderTest, case: CacheCase, name: str = "", slot: int = 0) -> str:
    shape = f"{len(case.slots)}, {case.num_kv_heads}, {case.head_dim}"
    lines = [
        *case.lines(),
        f"k, v = bits({shape}, seed={4 * case.seed + 2}), bits({shape}, seed={4 * case.seed + 3})",
        f'slots = torch.tensor({list(case.slots)}, device="{case.device}")',
    ]
    call = f"{target.name}.store(k, v, slots, k_cache, v_cache)"
    if not name:
        return "\n".join(["import torch", *target.opening(), *lines, call]) + "\n"
    place = f"{name}_cache[{slot // case.block_size}, {slot % case.block_size}]"
    before = f"{name}[{case.slots.index(slot)}]" if slot in case.slots else f"{place}.clone()"
    word = _WORDS[case.dtype]
    ending = [f"expected = {before}", call, f"assert torch.equal({place}.view({word}), expected.view({word}))"]
    return "\n".join(["import torch", *target.opening(), *lines, *ending]) + "\n"


@st.composite
def _caches(draw: DrawFn, served: Served) -> CacheCase:
    return CacheCase(
        dtype=draw(st.sampled_from(served.dtypes)),
        num_blocks=draw(st.integers(1, 6)),
        block_size=draw(st.sampled_from(served.block_sizes)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from(served.head_dims)),
        slots=(),
        seed=draw(st.integers(0, 99)),
        device=served.device,
    )


@st.composite
def _stores(draw: DrawFn, served: Served, pad_slot: int | None) -> CacheCase:
    case = draw(_caches(served))
    slots = list(range(case.num_blocks * case.block_size))
    random.Random(draw(st.integers(0, 99))).shuffle(slots)
    slots = slots[: draw(st.integers(1, min(len(slots), 20)))]
    if pad_slot is not None:
        slots = [pad_slot if draw(st.booleans()) else slot for slot in slots]
    return replace(case, slots=tuple(slots))


@st.composite
def _tables(draw: DrawFn, served: Served) -> tuple[CacheCase, list[int], int]:
    case = draw(_caches(served))
    table = draw(st.permutations(range(case.num_blocks)))
    table = table[: draw(st.integers(1, len(table)))]
    return case, table, draw(st.integers(1, len(table) * case.block_size))
