"""Which token each row is: generated arrangements of a step's work, with tokens that are alike."""

from itertools import accumulate, chain

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.engines.by_content.forwards import RowTeller, StepForward
from harness.engines.by_content.rows import (
    EARLIER,
    ORDERS,
    PADDING,
    Habits,
    RequestWork,
    in_order,
    learn_habits,
    tell_rows,
)
from harness.engines.by_content.steps import Site

IN_ORDER = [("work", False)]
PAD = 0


def ids(*lines):
    return torch.tensor(lines)


def rows_of(forwards, work, habits=None, **options):
    told = tell_rows(forwards, work, habits or Habits(orders=IN_ORDER), **options)
    return [rows.tolist() for rows in told.rows], told.ambiguous


TWO = [RequestWork([5, 5, 9], 0), RequestWork([5, 5, 9, 5, 5], 0)]


@pytest.mark.parametrize(
    ("forwards", "work", "rows"),
    [
        ([ids([5, 5, 9, 5, 5, 9, 5, 5])], TWO, [[[0, 1, 2, 3, 4, 5, 6, 7]]]),
        ([ids([5, 5, 9]), ids([5, 5, 9, 5, 5])], TWO, [[[0, 1, 2]], [[3, 4, 5, 6, 7]]]),
        ([ids([5, 5, 9, 0, 0], [5, 5, 9, 5, 5])], TWO, [[[0, 1, 2, -1, -1], [3, 4, 5, 6, 7]]]),
        ([ids([0, 0, 5, 5, 9], [5, 5, 9, 5, 5])], TWO, [[[-1, -1, 0, 1, 2], [3, 4, 5, 6, 7]]]),
        ([ids([5, 5]), ids([9, 5]), ids([5, 9]), ids([5, 5])], TWO, [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]),
        # tokens of earlier steps, computed again
        ([ids([5, 6, 7, 8])], [RequestWork([5, 6, 7, 8], 3)], [[[EARLIER, EARLIER, EARLIER, 0]]]),
        # a warm-up of zeros, a capture and a replay
        ([ids([0, 0]), ids([7, 8]), ids([7, 8, 0])], [RequestWork([7, 8], 0)], [[[-1, -1]], [[0, 1]], [[0, 1, -1]]]),
        # wrong ids keep their row: the first chunk's tokens in the second one
        ([ids([1, 2]), ids([1, 2])], [RequestWork([1, 2, 3, 4], 0)], [[[0, 1]], [[2, 3]]]),
        ([ids([1, 9, 3])], [RequestWork([1, 2, 3], 0)], [[[0, 1, 2]]]),
    ],
)
def test_rows_of_alike_tokens(forwards, work, rows):
    assert rows_of(forwards, work, Habits(orders=IN_ORDER, pads={PAD})) == (rows, frozenset())


def test_equal_requests_in_no_known_order_are_ambiguous():
    work = [RequestWork([7], 0), RequestWork([3, 5], 1), RequestWork([8, 5], 1)]
    assert rows_of([ids([7, 5, 5])], work, Habits())[1] == {1, 2}
    assert rows_of([ids([7, 5, 5])], work) == ([[[0, 1, 2]]], frozenset())
    assert rows_of([ids([5, 5, 7])], work, Habits(orders=[("work", True)])) == ([[[2, 1, 0]]], frozenset())


def test_work_that_is_not_computed_leaves_all_rows_ambiguous():
    assert rows_of([ids([5, 6])], [RequestWork([5, 6, 7], 0)]) == ([[[PADDING, PADDING]]], {0, 1, 2})


def test_a_search_that_is_too_long_is_given_up():
    work = [RequestWork([5], 0) for _ in range(64)]
    rows, ambiguous = rows_of([ids([*[5] * 64, 9])], work, Habits())
    assert len(ambiguous) == 64
    assert rows == [[[PADDING] * 65]] or len(rows[0][0]) == 65


def test_forwards_up_to_now_show_their_padding():
    work, habits = [RequestWork([5, 6, 7, 8], 0)], Habits(orders=IN_ORDER, pads={PAD})
    assert rows_of([ids([5, 6, 0])], work, habits, is_whole=False)[0] == [[[0, 1, PADDING]]]


def arranged(work, order, layout, chunk, pad):
    """Lay out a step's work as an engine does; return the ids of the forwards and the rows."""
    starts = [0, *accumulate(item.length for item in work)]
    parts = [
        [(token, starts[at] + place) for place, token in enumerate(work[at].tokens[work[at].first :])]
        for at in in_order(order, work)
    ]
    padding = (PAD, PADDING)
    match layout:
        case "packed":
            lines = [[[*chain(*parts), *[padding] * pad]]]
        case "loop":
            lines = [[[*part, *[padding] * pad]] for part in parts]
        case "chunks":
            pieces = [part[at : at + chunk] for part in parts for at in range(0, len(part), chunk)]
            lines = [[piece + [padding] * (chunk - len(piece) if pad else 0)] for piece in pieces]
        case _:
            width = max(map(len, parts)) + pad
            sides = [[padding] * (width - len(part)) for part in parts]
            pairs = zip(sides, parts, strict=True)
            lines = [[side + part if layout == "left" else part + side for side, part in pairs]]
    forwards = [torch.tensor([[token for token, _ in line] for line in forward]) for forward in lines]
    return forwards, [[[row for _, row in line] for line in forward] for forward in lines]


WORK = st.lists(
    st.builds(
        lambda earlier, computed: RequestWork([*earlier, *computed], len(earlier)),
        st.lists(st.integers(1, 3), max_size=4),
        st.lists(st.integers(0, 3), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=150)
@given(
    work=WORK,
    order=st.sampled_from(ORDERS),
    layout=st.sampled_from(["packed", "loop", "chunks", "left", "right"]),
    chunk=st.integers(1, 4),
    pad=st.integers(0, 2),
)
@example(work=[RequestWork([PAD] * 5, 0)], order=ORDERS[0], layout="chunks", chunk=4, pad=1)
def test_no_row_is_taken_for_another_one(work, order, layout, chunk, pad):
    """Hostile tokens may be ambiguous, and what is told holds the right token; unlike tokens are all told right."""
    unlike, number = [], 10
    for item in work:
        unlike.append(RequestWork([*range(number, number + len(item.tokens))], item.first))
        number += len(item.tokens)
    forwards, rows = arranged(unlike, order, layout, chunk, pad)
    habits = Habits(pads={PAD})
    told = tell_rows(forwards, unlike, habits)
    assert (told.ambiguous, [item.tolist() for item in told.rows]) == (frozenset(), rows)
    learn_habits(forwards, unlike, habits)
    assert order in habits.orders
    forwards, rows = arranged(work, order, layout, chunk, pad)
    told = tell_rows(forwards, work, habits)
    for told_rows, true_rows in zip(told.rows, rows, strict=True):
        for row, true_row in zip(told_rows.flatten().tolist(), chain(*true_rows), strict=True):
            assert row in told.ambiguous or true_row in told.ambiguous or row == true_row


def test_a_step_of_unlike_tokens_shows_lines_that_hold_a_token_of_each_request():
    habits = Habits()
    learn_habits([ids([3, 6], [4, 7], [5, PAD])], [RequestWork([3, 4, 5], 0), RequestWork([6, 7], 0)], habits)
    assert habits.is_turned
    work = [RequestWork([5, 5, 9], 0), RequestWork([5, 5], 0)]
    assert rows_of([ids([5, 5], [5, 5], [9, PAD])], work, habits) == ([[[0, 3], [1, 4], [2, PADDING]]], frozenset())


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_row_that_is_alone_may_lie_in_another_way(is_reversed):
    """Of four heads that share two keys, as HF computes attention of one token."""
    queries, keys = Site("attention", 0, "result"), Site("attention", 0, "keys")
    rows, nothing = torch.randn(6, 64), torch.zeros(2, 8, 16)
    steps = [
        (RequestWork(range(6), 0), rows.view(1, 6, 4, 16).transpose(1, 2), nothing[:, :6]),
        (RequestWork(range(7), 6), rows[:1].view(1, 2, 2, 16), nothing[:, :7]),
    ]
    steps = [
        ([StepForward(None, torch.empty(0, 0), {queries: query, keys: kept})], [work], len(query.flatten()) // 64)
        for work, query, kept in steps
    ]
    teller = RowTeller(())
    for forwards, work, _ in reversed(steps) if is_reversed else steps:
        teller.learn_layouts(forwards, work)
    for forwards, work, num_rows in steps:
        told = teller.in_order(forwards, work)
        assert torch.equal(told[queries].values, rows[:num_rows])
        assert told[keys].values.shape == (num_rows, 32)
