"""Numbers that are fitted to rows: by a search, and by steps."""

import math

import pytest
import torch

from harness.judge.explain.core.fit import fit_by_search, fit_by_steps, fit_factor, fit_factor_near_one

from ..toys import random

ROWS = random(5, 4, seed=1)
GRID = [2.0**power for power in range(-6, 7)]


@pytest.mark.parametrize("number", [1 / 64, 0.0431, 1.0, 1.4, 3.7, 47.3, 64.0])
def test_a_search_comes_between_the_places_of_its_grid(number):
    actual = fit_by_search(GRID, lambda item: abs(math.log(item / number)))
    assert math.isclose(actual, number, rel_tol=1e-8)


def test_a_search_asks_once_for_a_number():
    asked = []
    fit_by_search(GRID, lambda item: asked.append(item) or abs(item - 3))
    assert len(asked) == len(set(asked)) <= len(GRID) + 80


def test_of_numbers_that_are_as_good_the_first_is_returned():
    assert fit_by_search(GRID, lambda item: 0.0 if item in (GRID[3], GRID[7]) else 1.0) == GRID[3]


@pytest.mark.parametrize("number", [-3.0, -0.2, 0.0, 0.5, 7.0])
def test_steps_reach_numbers_of_any_sign(number):
    actual = fit_by_steps((1 + number) * ROWS, lambda item: (1 + item) * ROWS)
    assert math.isclose(actual, number, abs_tol=1e-7)


@pytest.mark.parametrize("number", [0.02, 0.9, 1.0, 30.0])
def test_steps_of_a_logarithm_reach_factors(number):
    def under(item):
        return torch.tanh(item * ROWS)

    assert math.isclose(fit_factor(under(number), under, 1.0), number, rel_tol=1e-6)


def test_noise_moves_a_number_as_least_squares_do():
    actual = 1.7 * ROWS + 0.1 * random(5, 4, seed=2)
    expected = float((actual * ROWS).sum() / ROWS.square().sum())
    assert math.isclose(fit_by_steps(actual, lambda item: item * ROWS), expected, rel_tol=1e-7)


@pytest.mark.parametrize(
    "under",
    [
        lambda item: None, lambda item: None if item else ROWS, lambda item: ROWS, lambda item: ROWS / 0 + item,
    ],
)  # fmt: skip
def test_rows_that_do_not_follow_a_number_have_none(under):
    assert fit_by_steps(2 * ROWS, under) is None
    assert fit_factor(2 * ROWS, lambda item: under(math.log(item)), 1.0) is None


def test_a_step_is_one_at_most():
    asked = []
    fit_by_steps(9 * ROWS, lambda item: asked.append(item) or item * ROWS)
    assert asked[::2][:4] == pytest.approx([0, 1, 2, 3])


@pytest.mark.parametrize(("number", "num_asked"), [(1.4, 30), (None, 8)])
def test_a_factor_that_does_not_bring_rows_nearer_is_given_up(number, num_asked):
    """Half of the error lies along the slope, and none of it goes away."""
    asked, noise = [], random(5, 4, seed=3)

    def under(factor):
        asked.append(factor)
        return factor * ROWS if number else ROWS + 1e-3 * math.sin(1e3 * (factor - 1)) * noise

    fitted = fit_factor_near_one(number * ROWS if number else ROWS + noise, ROWS, under)
    assert fitted == (None if number is None else pytest.approx(number))
    assert len(asked) <= num_asked
