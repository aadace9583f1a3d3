"""Rows by content, against the tokens themselves."""

import torch

from harness.formats.recording import RequestInfo
from harness.judge.compare.align import Prefixes

from .judgements import rows_of

TOKENS = {9: (1, 2, 3), 4: (1, 2, 4, 3), 7: (2, 1), 30: (1, 2, 3), 5: (1,)}
PREFIXES = Prefixes([RequestInfo(id=id_, token_ids=list(ids), prompt_length=1) for id_, ids in TOKENS.items()])
ROWS = [(request, at) for request, tokens in TOKENS.items() for at in range(len(tokens))]


def test_rows_with_the_same_tokens_so_far_have_one_number():
    contents = [TOKENS[request][: at + 1] for request, at in ROWS]
    numbers = PREFIXES.of(rows_of(ROWS)).tolist()
    for one, ours in zip(contents, numbers, strict=True):
        for other, theirs in zip(contents, numbers, strict=True):
            assert (one == other) == (ours == theirs)
    assert sorted(set(numbers)) == list(range(PREFIXES.count))
    assert PREFIXES.count == len(set(contents))


def test_the_table_is_in_the_order_of_the_ids_and_ends_where_tokens_do():
    assert PREFIXES.table.shape == (5, 4)
    for row, request in enumerate(sorted(TOKENS)):
        known = PREFIXES.of(rows_of([(request, at) for at in range(len(TOKENS[request]))])).tolist()
        assert PREFIXES.table[row].tolist() == known + [-1] * (4 - len(known))
        for end in range(len(known) + 1):
            assert PREFIXES.up_to(request, end).tolist() == known[:end]


def test_nothing_at_all():
    nothing = Prefixes([])
    assert (nothing.count, tuple(nothing.table.shape)) == (0, (0, 0))
    assert nothing.table.dtype is torch.int64
