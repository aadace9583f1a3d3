"""Which rows are wrong, in words: the simplest description of exactly those."""

from types import SimpleNamespace

import pytest
import torch

from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.explain.trial.description import pattern, scope

# Two requests of prompts of 6 and 3 tokens, in chunks of 4, and then two steps of decode together.
STEPS = [  # step, request, positions
    (0, 0, range(4)), (1, 0, range(4, 6)), (1, 1, range(3)), (2, 0, [6]), (2, 1, [3]), (3, 0, [7]), (4, 1, [4]),
]  # fmt: skip
PLACES = [(step, request, position) for step, request, positions in STEPS for position in positions]
ROWS = Rows(
    **{
        name: torch.tensor(values)
        for name, values in zip(("step", "request", "position"), zip(*PLACES, strict=True), strict=True)
    }
)


def request(number, prompt_length):
    return SimpleNamespace(id=number, prompt_length=prompt_length, draft_of=None)


RECORDING = SimpleNamespace(manifest=SimpleNamespace(requests=[request(0, 6), request(1, 3)]))


def said(holds):
    return scope(ROWS, torch.tensor([holds(*place) for place in PLACES]), RECORDING)


@pytest.mark.parametrize(("words", "holds"), [
    ("every row", lambda step, request, position: True),
    ("every row but those at position 0", lambda step, request, position: position > 0),
    ("decode rows", lambda step, request, position: position >= (6, 3)[request]),
    ("prefill rows", lambda step, request, position: position < (6, 3)[request]),
    ("the last row of each prompt", lambda step, request, position: position == (5, 2)[request]),
    ("rows of a prompt after its first chunk", lambda step, request, position: request == 0 and 4 <= position < 6),
    ("rows that are not in their request's first step",
     lambda step, request, position: position >= (4, 3)[request]),
    ("rows in steps of one request alone", lambda step, request, position: step in (0, 3, 4)),
    ("rows in steps of several requests", lambda step, request, position: step in (1, 2)),
    ("rows from position 3 on", lambda step, request, position: position >= 3),
    ("rows at position 2", lambda step, request, position: position == 2),
    ("rows at every 3th position from 1 on", lambda step, request, position: position in (1, 4, 7)),
    ("request 1", lambda step, request, position: request == 1),
    ("decode rows of request 0", lambda step, request, position: request == 0 and position >= 6),
    ("rows from position 2 on of request 1", lambda step, request, position: request == 1 and position >= 2),
    ("3 of 13 rows", lambda step, request, position: (request, position) in ((0, 0), (0, 5), (1, 1))),
])  # fmt: skip
def test_rows_are_told_by_what_they_have_in_common(words, holds):
    assert said(holds) == words


def test_many_requests_are_counted():
    number = 9
    rows = Rows(
        request=torch.arange(number), position=torch.zeros(number, dtype=torch.int64), step=torch.arange(number)
    )
    recording = SimpleNamespace(manifest=SimpleNamespace(requests=[request(item, 1) for item in range(number)]))
    assert scope(rows, rows.request < 8, recording) == "8 requests"
    assert scope(rows, rows.request < 2, recording) == "requests 0, 1"


NUM_ROWS, WIDTH, HEAD_DIM = 12, 16, 4
RIGHT = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def pattern_of(actual, *, kind=Kind.LINEAR, positions=None, expected=RIGHT):
    return pattern(
        SimpleNamespace(
            operation=Operation(tap="model.layers.0.x", kind=kind),
            head_dim=HEAD_DIM,
            actual=actual,
            expected=expected,
            positions=torch.zeros(len(actual), dtype=torch.int64) if positions is None else positions,
        )
    )


def changed(elements, by=0.1):
    actual = RIGHT.clone()
    actual[:, elements] += by
    return actual


def test_the_size_is_relative_to_the_row():
    assert pattern_of(RIGHT * 1.25) == "off by 0.25 of the row's norm (cosine 1, norm 1.25 times)"


def test_other_rows_are_unrelated():
    another = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    text = pattern_of(another / another.norm(dim=1, keepdim=True) * RIGHT.norm(dim=1, keepdim=True))
    assert text.startswith("unrelated to what it should be (cosine ")
    assert "norm 1 times" in text


@pytest.mark.parametrize(("elements", "words"), [
    ([3, 4, 5], "only in elements 3 to 5 of 16"),
    ([3], "only in elements 3 to 3 of 16"),
    ([0, 5, 9], "only in 3 of 16 elements"),
    ([2, 4], "only in 2 of 16 elements"),
])  # fmt: skip
def test_elements_that_carry_the_error_are_named_where_they_follow_one_another(elements, words):
    assert pattern_of(changed(elements)).split("; ")[1:] == [words]


def test_all_elements_are_not_named():
    assert "only in" not in pattern_of(changed(list(range(WIDTH))))


def test_heads_are_named_where_the_operation_has_some():
    assert "only in heads 1, 3 of 4" in pattern_of(changed([4, 13]), kind=Kind.ATTENTION)
    assert "heads" not in pattern_of(changed([4, 13]), kind=Kind.LINEAR)
    assert "heads" not in pattern_of(changed([0, 4, 8, 12]), kind=Kind.ATTENTION), "all of them"


@pytest.mark.parametrize(("sign", "words"), [(1, "grows with the position (rank correlation 1.00)"),
                                             (-1, "falls with the position (rank correlation -1.00)")])  # fmt: skip
def test_an_error_that_follows_the_position(sign, words):
    positions = torch.arange(NUM_ROWS) if sign > 0 else torch.arange(NUM_ROWS).flip(0)
    assert pattern_of(RIGHT * (1 + torch.arange(1, NUM_ROWS + 1)[:, None] / 100), positions=positions).endswith(words)


def test_few_rows_or_positions_show_no_growth():
    wrong = RIGHT * (1 + torch.arange(1, NUM_ROWS + 1)[:, None] / 100)
    assert "position" not in pattern_of(wrong[:7], positions=torch.arange(7), expected=RIGHT[:7])
    assert "position" not in pattern_of(wrong, positions=torch.arange(NUM_ROWS) % 7)
    shuffled = torch.tensor([5, 1, 9, 3, 11, 0, 7, 2, 10, 4, 8, 6])
    assert "position" not in pattern_of(wrong, positions=shuffled)


@pytest.mark.parametrize("size", [1e-6, 0.1, 40.0])
@pytest.mark.parametrize(("share", "is_said"), [(0.009, False), (0.011, True)])
def test_what_carries_a_hundredth_of_the_largest_error_carries_it_too(size, share, is_said):
    actual = RIGHT.clone()
    actual[:, 6] += size
    actual[:, 7] += share * size
    assert ("only in elements 6 to 7" in pattern_of(actual)) == is_said
    assert ("only in elements 6 to 6" in pattern_of(actual)) != is_said
    actual = RIGHT.clone()
    actual[:, 6] += size
    actual[:, 1] += share * size
    heads = "only in heads 0, 1 of 4" if is_said else "only in heads 1 of 4"
    assert heads in pattern_of(actual, kind=Kind.ATTENTION)


@pytest.mark.parametrize(("cosine", "is_unrelated"), [(0.29, True), (0.31, False), (-0.29, True), (-0.31, False)])
def test_rows_are_unrelated_below_a_cosine(cosine, is_unrelated):
    across = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    unit = torch.nn.functional.normalize(RIGHT, dim=1)
    across = torch.nn.functional.normalize(across - (across * unit).sum(dim=1, keepdim=True) * unit, dim=1)
    actual = RIGHT.norm(dim=1, keepdim=True) * (cosine * unit + (1 - cosine**2) ** 0.5 * across)
    assert pattern_of(actual).startswith("unrelated") == is_unrelated


@pytest.mark.parametrize("sign", [1, -1])
def test_an_error_that_hardly_follows_the_position(sign):
    """Ranks that are exchanged: 0.9 and 0.79 are at both sides of the limit."""
    for order, is_said in (
        ([1, 0, 3, 2, 5, 4, 9, 6, 7, 8, 11, 10], True),
        ([3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8], False),
    ):
        ranks = torch.tensor(order, dtype=torch.float64)
        correlation = float(torch.corrcoef(torch.stack((torch.arange(12.0).double(), ranks)))[0, 1])
        assert (correlation > 0.8) == is_said
        wrong = RIGHT * (1 + (sign * ranks + 20)[:, None] / 100)
        assert ("with the position" in pattern_of(wrong, positions=torch.arange(12))) == is_said


def test_eight_rows_show_growth():
    wrong = RIGHT * (1 + torch.arange(1, NUM_ROWS + 1)[:, None] / 100)
    assert "grows" in pattern_of(wrong[:8], positions=torch.arange(8), expected=RIGHT[:8])
