"""Sequences side by side, and what was recorded of a tap in them, against a loop over their rows."""

import random

import pytest
import torch

from harness.base.numerics import Numerics
from harness.formats.recording import RequestInfo
from harness.judge.compare.batch import PaddedBatch, make_batches
from harness.judge.compare.sequences import RowSequence

from .in_memory import Step, recording_of

REQUESTS = {7: (11, 12, 13, 14), 2: (21, 22), 9: (31, 32, 33)}
EVERYWHERE, SOMEWHERE, ONCE, NOWHERE = "everywhere", "somewhere", "once", "nowhere"


def sequence(request, places, own=None):
    """Rows of a request from position 0 on, each a step and a row in it or None."""
    step, row = zip(*(place or (-1, -1) for place in places), strict=True)
    return RowSequence(
        request=RequestInfo(id=request, token_ids=list(REQUESTS[request]), prompt_length=1),
        step=torch.tensor(step),
        row=torch.tensor(row),
        is_own=torch.tensor([place is not None for place in places] if own is None else own),
    )


def value(step, row, width=2):
    return [100.0 * step + 10 * row + at for at in range(width)]


def steps_of(sizes, partial):
    """Steps of so many rows; one tap is everywhere, one at some rows of some steps, one in step 1 alone."""
    made = []
    for index, size in enumerate(sizes):
        taps = {EVERYWHERE: torch.tensor([value(index, row) for row in range(size)])}
        if index in partial:
            taps[SOMEWHERE] = torch.tensor([value(index, row) for row in partial[index]]).view(-1, 2)
        if index == 1:
            taps[ONCE] = taps[EVERYWHERE]
        made.append(Step([(7, 0)] * size, taps=taps, rows_of={SOMEWHERE: partial[index]} if index in partial else {}))
    return made


def check(batch, sequences, partial):
    """Hold all that a batch says against a loop."""
    num_tokens = max(map(len, sequences))
    assert (batch.num_tokens, batch.num_places) == (num_tokens, num_tokens * len(sequences))
    expected = {EVERYWHERE: {}, SOMEWHERE: {}, ONCE: {}, NOWHERE: {}}
    for line, item in enumerate(sequences):
        tokens = [*REQUESTS[item.request.id][: len(item)], *[0] * (num_tokens - len(item))]
        assert batch.token_ids[line].tolist() == tokens
        padded = [*item.is_own.tolist(), *[False] * (num_tokens - len(item))]
        assert batch.is_own.view(len(sequences), -1)[line].tolist() == padded
        for position, (step, row) in enumerate(zip(item.step.tolist(), item.row.tolist(), strict=True)):
            if step < 0:
                continue
            place = line * num_tokens + position
            expected[EVERYWHERE][place] = value(step, row)
            if row in partial.get(step, ()):
                expected[SOMEWHERE][place] = value(step, row)
            if step == 1:
                expected[ONCE][place] = value(step, row)
    for tap, known in expected.items():
        found = batch.recorded(tap)
        there = {} if found is None else dict(zip(found.places.tolist(), found.rows.tolist(), strict=True))
        assert there == known
        assert (found is None) == (not known)
        assert found is None or len(found.places) == len(known)


@pytest.mark.parametrize("seed", range(8))
def test_what_was_recorded_stands_where_its_rows_do(seed):
    generator = random.Random(seed)
    sizes = [generator.randint(1, 5) for _ in range(4)]
    partial = {step: generator.sample(range(sizes[step]), generator.randint(1, sizes[step])) for step in (0, 2)}
    places = [(step, row) for step, size in enumerate(sizes) for row in range(size)]
    sequences = []
    for request, tokens in REQUESTS.items():
        length = generator.randint(1, len(tokens))
        sequences.append(sequence(request, [generator.choice([*places, None]) for _ in range(length)]))
    check(PaddedBatch(recording_of(REQUESTS, steps_of(sizes, partial)), sequences), sequences, partial)


@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 2), (3, 2, 1), (2,), (0, 1, 1, 3), (0, 0, 1, 1)])
def test_rows_of_one_step_in_any_order(rows):
    sequences = [sequence(7, [(1, row) for row in rows])]
    batch = PaddedBatch(recording_of(REQUESTS, steps_of([1, 4], {})), sequences)
    check(batch, sequences, {})
    is_run = list(rows) == list(range(rows[0], rows[0] + len(rows)))
    found = batch.recorded(EVERYWHERE).rows
    assert (found.untyped_storage().nbytes() > found.nbytes or (len(rows) == 4 and is_run)) == (is_run), "a view"


def test_the_identity_of_places():
    sequences = [sequence(9, [(0, 0), (2, 1), None]), sequence(2, [(1, 4), (3, 0)])]
    batch = PaddedBatch(recording_of(REQUESTS, []), sequences)
    rows = batch.rows(torch.tensor([1, 2, 3, 4, 5]))
    assert rows.request.tolist() == [9, 9, 2, 2, 2]
    assert rows.position.tolist() == [1, 2, 0, 1, 2]
    assert rows.step.tolist() == [2, -1, 1, 3, -1]


def lengths(batches):
    return [[len(item) for item in batch.sequences] for batch in batches]


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [(8, [[4, 4], [3, 2], [2]]), (7, [[4], [4], [3, 2], [2]]), (9, [[4, 4], [3, 2, 2]]), (100, [[4, 4, 3, 2, 2]]),
     (1, [[4], [4], [3], [2], [2]])],
)  # fmt: skip
def test_batches_are_as_full_as_the_longest_of_their_sequences_lets_them(max_tokens, expected):
    made = [sequence(request, [(0, 0)] * length) for request, length in ((2, 2), (7, 4), (9, 3), (7, 4), (9, 2))]
    assert lengths(make_batches(recording_of(REQUESTS, []), made, max_tokens)) == expected


def test_rotary_frequencies_that_follow_the_request_are_those_of_all_of_its_tokens():
    """HF is given as many tokens, and judges again what a request of another length left in the cache."""
    steps = [Step([(7, 0), (7, 1), (2, 0)])]
    recording = recording_of(REQUESTS, steps, numerics=Numerics(rotates_by_request=True))
    draft = RequestInfo(id=5, token_ids=[11, 13], prompt_length=1, draft_of=7)
    recording.manifest.requests.append(draft)
    preempted, found = sequence(7, [(0, 0), (0, 1)]), sequence(2, [(0, 0), None], own=[False, False])
    assert PaddedBatch(recording, [preempted]).is_own.tolist() == [True, True, False, False]
    assert PaddedBatch(recording, [preempted]).token_ids.tolist() == [[11, 12, 0, 0]]
    assert PaddedBatch(recording, [found]).is_own.tolist() == [True, False]
    rejected = RowSequence(request=draft, step=torch.tensor([0]), row=torch.tensor([0]), is_own=torch.tensor([False]))
    assert PaddedBatch(recording, [rejected]).is_own.tolist() == [False] * 4
    assert PaddedBatch(recording_of(REQUESTS, steps), [preempted, found]).is_own.tolist() == [True, True, False, False]
