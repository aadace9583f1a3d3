"""Sequences side by side, and the positions of a sample: which it holds, and what it may miss."""

import itertools
import random

import pytest
import torch

from harness.base.numerics import Numerics
from harness.formats.recording import RequestInfo
from harness.judge.compare.align import Rows
from harness.judge.compare.batch import CONFIDENCE, PaddedBatch, RowSample, make_batches, rows_standing_out
from harness.judge.compare.propagated import PropagatedErrors, Propagation
from harness.judge.compare.sequences import RowSequence

from .in_memory import Step, recording_of

REQUESTS = {7: (11, 12, 13, 14), 2: (21, 22), 9: (31, 32, 33)}
EVERYWHERE, SOMEWHERE, ONCE, NOWHERE = "everywhere", "somewhere", "once", "nowhere"


def sequence(request, places, is_own=None):
    """Rows of a request from position 0 on, each a step and a row in it or None."""
    step, row = zip(*(place or (-1, -1) for place in places), strict=True)
    return RowSequence(
        request=RequestInfo(id=request, token_ids=list(REQUESTS[request]), prompt_length=1),
        step=torch.tensor(step),
        row=torch.tensor(row),
        is_own=torch.tensor([place is not None for place in places] if is_own is None else is_own),
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
        recorded = batch.recorded(tap)
        there = {} if recorded is None else dict(zip(recorded.places.tolist(), recorded.rows.tolist(), strict=True))
        assert there == known
        assert (recorded is None) == (not known)
        assert recorded is None or len(recorded.places) == len(known)


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
    recorded = batch.recorded(EVERYWHERE).rows
    assert (recorded.untyped_storage().nbytes() > recorded.nbytes or (len(rows) == 4 and is_run)) == (is_run), "a view"


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
    preempted, actual = sequence(7, [(0, 0), (0, 1)]), sequence(2, [(0, 0), None], is_own=[False, False])
    assert PaddedBatch(recording, [preempted]).is_own.tolist() == [True, True, False, False]
    assert PaddedBatch(recording, [preempted]).token_ids.tolist() == [[11, 12, 0, 0]]
    assert PaddedBatch(recording, [actual]).is_own.tolist() == [True, False]
    rejected = RowSequence(request=draft, step=torch.tensor([0]), row=torch.tensor([0]), is_own=torch.tensor([False]))
    assert PaddedBatch(recording, [rejected]).is_own.tolist() == [False] * 4
    assert PaddedBatch(recording_of(REQUESTS, steps), [preempted, actual]).is_own.tolist() == [True, True, False, False]


def computed_by(steps, request=0, is_own=None):
    """Rows of a request, given by the step that computed each."""
    length = len(steps)
    return RowSequence(
        request=RequestInfo(id=request, token_ids=list(range(length)), prompt_length=1),
        step=torch.tensor(steps),
        row=torch.zeros(length, dtype=torch.int64),
        is_own=torch.ones(length, dtype=torch.bool) if is_own is None else torch.tensor(is_own),
    )


def rows(*places):
    request, position = torch.tensor(places).T
    return Rows(request=request, position=position, step=torch.zeros_like(request))


def positions(sample, *group, index=0):
    return sample.positions(list(group), index).tolist()


@pytest.mark.parametrize("length", [41, 100, 257])
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_one_position_of_every_stretch_is_drawn(length, num_rows):
    actual = positions(RowSample(num_rows=num_rows), computed_by([0] * length))
    edges = [at * length // num_rows for at in range(num_rows + 1)]
    for begin, end in itertools.pairwise(edges):
        assert any(begin <= position < end for position in actual)
    assert {0, length - 1} <= set(actual), "the borders of the only step"
    assert num_rows <= len(actual) <= num_rows + 2
    assert actual == sorted(set(actual))


def test_every_position_may_be_drawn():
    drawn = set()
    for seed in range(200):
        drawn |= set(positions(RowSample(num_rows=4, seed=seed), computed_by([0] * 20)))
    assert drawn == set(range(20))


def test_the_same_seed_draws_the_same_and_each_batch_draws_its_own():
    one = computed_by([0] * 300)
    assert positions(RowSample(num_rows=9), one) == positions(RowSample(num_rows=9), one)
    assert positions(RowSample(num_rows=9), one) != positions(RowSample(num_rows=9, seed=1), one)
    assert positions(RowSample(num_rows=9), one) != positions(RowSample(num_rows=9), one, index=1)


def test_all_rows_are_no_sample():
    assert RowSample(num_rows=20).positions([computed_by([0] * 20)], 0) is None
    assert RowSample(num_rows=19).positions([computed_by(range(20))], 0) is None, "each is the border of a step"


def test_where_steps_begin_and_end_is_in_it():
    """Chunks of a prompt, and decode, where every step is one row."""
    chunked = computed_by([*[0] * 30, *[1] * 30, *[2] * 37, 3, 4, 5])
    assert {0, 29, 30, 59, 60, 96, 97, 98, 99} <= set(positions(RowSample(num_rows=10), chunked))


def test_borders_of_rows_that_others_computed_are_none():
    actual = positions(RowSample(num_rows=1), computed_by([0] * 20 + [1] * 20, is_own=[False] * 20 + [True] * 20))
    assert {20, 39} <= set(actual)
    assert len(actual) <= 3


def test_of_many_decode_steps_as_many_are_in_it_as_are_drawn():
    assert len(positions(RowSample(num_rows=10), computed_by(range(500)))) <= 21


def test_requests_side_by_side_have_the_same_positions():
    actual = positions(RowSample(num_rows=4), computed_by([0] * 90), computed_by([0] * 70, request=1))
    assert {0, 69, 89} <= set(actual)


def test_rows_that_stand_out_are_in_it():
    out = rows((0, 77), (1, 33), (0, 41))
    sample = RowSample(num_rows=8, standing_out=out)
    assert {77, 41} <= set(positions(sample, computed_by([0] * 90)))
    assert {77, 33} <= set(positions(sample, computed_by([0] * 90), computed_by([0] * 80, request=1)))
    assert 41 not in positions(sample, computed_by([0] * 90), computed_by([0] * 80, request=1)), (
        "no more than a quarter"
    )


def propagated(where, ratio):
    ratio = torch.tensor(ratio, dtype=torch.float64)
    return PropagatedErrors(rows=where, metrics=None, ratio=ratio)


def test_a_row_stands_out_where_it_is_far_off_for_its_tap():
    where = rows((0, 0), (0, 1), (1, 0), (1, 1))
    actual = rows_standing_out(Propagation(errors={
        "a": propagated(where, [1, 1, 1, 8]), "b": propagated(where, [500, 400, 9000, 450]),
    }))  # fmt: skip
    assert actual.places()[:2] == [(1, 0), (1, 1)]
    assert sorted(actual.places()) == where.places()


def test_what_is_not_finite_stands_out_most():
    where = rows((0, 0), (0, 1), (0, 2))
    for nothing in (float("nan"), float("inf")):
        actual = rows_standing_out(Propagation(errors={"a": propagated(where, [1, 50, nothing])}))
        assert actual.places() == [(0, 2), (0, 1), (0, 0)]
    exact = rows_standing_out(Propagation(errors={"a": propagated(where, [0, 0, 1])}))
    assert exact.places()[0] == (0, 2)
    assert rows_standing_out(Propagation()) is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("length", "num_rows"), [(12, 3), (12, 4), (20, 4), (18, 9)])
def test_so_many_wrong_rows_are_found_wherever_they_are(length, num_rows):
    """By all ways to place them, of stretches of one length."""
    stretch = length // num_rows
    least = RowSample(num_rows=num_rows).least_found(length)

    def missed(wrong):
        counts = [sum(begin <= at < begin + stretch for at in wrong) for begin in range(0, length, stretch)]
        return torch.tensor([1 - number / stretch for number in counts]).prod().item()

    def worst(number):
        return max(missed(wrong) for wrong in itertools.combinations(range(length), number))

    assert worst(least) <= 1 - CONFIDENCE + 1e-6
    assert least == 1 or worst(least - 1) > 1 - CONFIDENCE


def test_a_sample_of_256_of_2048_rows_finds_23():
    assert RowSample(num_rows=256).least_found(2048) == 23
