"""Prompts for small blocks and large ones: lengths around the boundaries of blocks, beginnings in common."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from harness.properties.core.machine import CHOICES, Drawn, chosen

SMALL_BLOCK = 4
"""Lists are drawn as for blocks of at most this size, and stretched for larger ones."""


def token_lists(max_size: int, *, min_size: int = 1) -> st.SearchStrategy[list[int]]:
    """Return lists of zeros and ones, by two draws; `st.lists` takes two for each element."""

    def spell(size_and_bits: tuple[int, int]) -> list[int]:
        size, bits = size_and_bits
        return [bits >> index & 1 for index in range(size)]

    return st.tuples(st.integers(min_size, max_size), st.integers(0, 2**max_size - 1)).map(spell)


def stretch_of(block_size: int) -> int:
    """Return how often each token of a drawn list is repeated, so that it fills blocks of this size."""
    return -(-block_size // SMALL_BLOCK)


def prompts(max_size: int) -> Drawn:
    """Draw lists of up to `max_size` tokens; for large blocks as many times longer, and cut at or before a boundary."""

    def resolve(machine: Any, drawn: tuple[list[int], int]) -> list[int]:
        tokens, cut = drawn
        stretch = stretch_of(machine.block_size)
        stretched = [token for token in tokens for _ in range(stretch)]
        return stretched[: len(stretched) - (0, 1, stretch - 1)[cut] % stretch]

    return Drawn(st.tuples(token_lists(max_size), st.integers(0, 2)), resolve)


def similar_prompts(max_size: int, of: str = "history") -> Drawn:
    """Draw lists that begin as one of a machine's lists `of` that name does, and go on by up to three tokens."""

    def resolve(machine: Any, drawn: tuple[int, int, list[int]]) -> list[int]:
        choice, kept, more = drawn
        earlier: Sequence[list[int]] = getattr(machine, of)
        return [*chosen(earlier, choice)[: kept * stretch_of(machine.block_size)], *more]

    drawn = st.tuples(CHOICES, st.integers(1, max_size), token_lists(3, min_size=0))
    return Drawn(drawn, resolve, lambda machine: getattr(machine, of))
