"""Pairs of queries and keys: the closed formulas against counting them one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.profiling.formulas import causal_pairs, visible_pairs


def counted(num_queries: int, context_len: int, window: int | None) -> int:
    positions = range(context_len - num_queries, context_len)
    return sum(key <= position and (window is None or key > position - window)
               for position in positions for key in range(context_len))  # fmt: skip


@given(st.integers(1, 12), st.integers(0, 12), st.none() | st.integers(1, 16))
def test_the_formula_is_what_counting_gives(num_queries: int, num_before: int, window: int | None):
    context_len = num_queries + num_before
    assert visible_pairs(num_queries, context_len, window) == counted(num_queries, context_len, window)


@pytest.mark.parametrize(("num_queries", "context_len", "expected"), [(4, 4, 10), (1, 9, 9), (2, 5, 9)])
def test_a_chunk_is_a_rectangle_and_a_triangle(num_queries: int, context_len: int, expected: int):
    assert causal_pairs(num_queries, context_len) == expected
