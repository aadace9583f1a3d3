"""Which rows are wrong, in words: the simplest description of exactly those."""

from types import SimpleNamespace

import pytest
import torch

from harness.judge.compare.align import Rows
from harness.judge.explain.trial.description import scope

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
