"""A number that is fitted by a search over its logarithm, and the rows of one view."""

import math

import pytest
import torch

from harness.judge.explain.attention.softmax import fitted_factor

from ..toy_attention import PLACES, Toy


@pytest.mark.parametrize("start", [0.01, 8.0])
@pytest.mark.parametrize("logarithm", [-4.0, -1.23456789, 0.0, 0.06, 3.99])
def test_a_number_is_found_within_fifty_times_more_or_less(start, logarithm):
    meant = start * math.exp(logarithm)
    actual = fitted_factor(start, lambda number: abs(number - meant))
    assert math.isclose(actual, meant, rel_tol=1e-8)


def test_the_deeper_of_two_valleys_is_found():
    def error(number):
        return min(0.1 + abs(math.log(number)), abs(math.log(number) - 2.5))

    assert math.isclose(fitted_factor(1.0, error), math.exp(2.5), rel_tol=1e-8)


def test_the_rows_of_each_view(tmp_path):
    failure = Toy(tmp_path / "r").failure(torch.arange(len(PLACES) * 24.0, dtype=torch.float64).view(-1, 24))
    first, second = (failure.actual[failure.rows_of(view)] for view in failure.views)
    assert len(first) == len(failure.views[0].rows)
    assert torch.equal(torch.cat((first, second)), failure.actual)
    assert torch.equal(failure.over_views(lambda view: view.query.flatten(1)),
                       torch.cat([view.query.flatten(1) for view in failure.views]))  # fmt: skip
    with pytest.raises(ValueError, match="not of this operation"):
        failure.rows_of(failure.views[0].select(torch.arange(2)))
