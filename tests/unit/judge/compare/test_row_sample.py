"""Which positions a sample holds, and what it may leave unseen."""

import itertools

import pytest
import torch

from harness.formats.recording import RequestInfo
from harness.judge.compare.align import Rows
from harness.judge.compare.batch import CONFIDENCE, RowSample, rows_standing_out
from harness.judge.compare.propagated import PropagatedErrors, Propagation
from harness.judge.compare.sequences import RowSequence


def sequence(steps, request=0, is_own=None):
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
    found = positions(RowSample(num_rows=num_rows), sequence([0] * length))
    edges = [at * length // num_rows for at in range(num_rows + 1)]
    for begin, end in itertools.pairwise(edges):
        assert any(begin <= position < end for position in found)
    assert {0, length - 1} <= set(found), "the borders of the only step"
    assert num_rows <= len(found) <= num_rows + 2
    assert found == sorted(set(found))


def test_every_position_may_be_drawn():
    drawn = set()
    for seed in range(200):
        drawn |= set(positions(RowSample(num_rows=4, seed=seed), sequence([0] * 20)))
    assert drawn == set(range(20))


def test_the_same_seed_draws_the_same_and_each_batch_draws_its_own():
    one = sequence([0] * 300)
    assert positions(RowSample(num_rows=9), one) == positions(RowSample(num_rows=9), one)
    assert positions(RowSample(num_rows=9), one) != positions(RowSample(num_rows=9, seed=1), one)
    assert positions(RowSample(num_rows=9), one) != positions(RowSample(num_rows=9), one, index=1)


def test_all_rows_are_no_sample():
    assert RowSample(num_rows=20).positions([sequence([0] * 20)], 0) is None
    assert RowSample(num_rows=19).positions([sequence(range(20))], 0) is None, "each is the border of a step"


def test_where_steps_begin_and_end_is_in_it():
    """Chunks of a prompt, and decode, where every step is one row."""
    chunked = sequence([*[0] * 30, *[1] * 30, *[2] * 37, 3, 4, 5])
    assert {0, 29, 30, 59, 60, 96, 97, 98, 99} <= set(positions(RowSample(num_rows=10), chunked))


def test_borders_of_rows_that_others_computed_are_none():
    found = positions(RowSample(num_rows=1), sequence([0] * 20 + [1] * 20, is_own=[False] * 20 + [True] * 20))
    assert {20, 39} <= set(found)
    assert len(found) <= 3


def test_of_many_decode_steps_as_many_are_in_it_as_are_drawn():
    assert len(positions(RowSample(num_rows=10), sequence(range(500)))) <= 21


def test_requests_side_by_side_have_the_same_positions():
    found = positions(RowSample(num_rows=4), sequence([0] * 90), sequence([0] * 70, request=1))
    assert {0, 69, 89} <= set(found)


def test_rows_that_stand_out_are_in_it():
    out = rows((0, 77), (1, 33), (0, 41))
    sample = RowSample(num_rows=8, standing_out=out)
    assert {77, 41} <= set(positions(sample, sequence([0] * 90)))
    assert {77, 33} <= set(positions(sample, sequence([0] * 90), sequence([0] * 80, request=1)))
    assert 41 not in positions(sample, sequence([0] * 90), sequence([0] * 80, request=1)), "no more than a quarter"


def propagated(where, ratio):
    ratio = torch.tensor(ratio, dtype=torch.float64)
    return PropagatedErrors(rows=where, metrics=None, ratio=ratio)


def test_a_row_stands_out_where_it_is_far_off_for_its_tap():
    where = rows((0, 0), (0, 1), (1, 0), (1, 1))
    found = rows_standing_out(Propagation(errors={
        "a": propagated(where, [1, 1, 1, 8]), "b": propagated(where, [500, 400, 9000, 450]),
    }))  # fmt: skip
    assert found.places()[:2] == [(1, 0), (1, 1)]
    assert sorted(found.places()) == where.places()


def test_what_is_not_finite_stands_out_most():
    where = rows((0, 0), (0, 1), (0, 2))
    for nothing in (float("nan"), float("inf")):
        found = rows_standing_out(Propagation(errors={"a": propagated(where, [1, 50, nothing])}))
        assert found.places() == [(0, 2), (0, 1), (0, 0)]
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
        each = [sum(begin <= at < begin + stretch for at in wrong) for begin in range(0, length, stretch)]
        return torch.tensor([1 - number / stretch for number in each]).prod().item()

    def worst(number):
        return max(missed(wrong) for wrong in itertools.combinations(range(length), number))

    assert worst(least) <= 1 - CONFIDENCE + 1e-6
    assert least == 1 or worst(least - 1) > 1 - CONFIDENCE


def test_a_sample_of_256_of_2048_rows_is_said_to_find_23():
    assert RowSample(num_rows=256).least_found(2048) == 23
