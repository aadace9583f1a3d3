"""Distances between distributions, against hand-made ones."""

import math

import pytest
import torch

from harness.extensions.quant.forward import distance, perplexity


def test_equal_distributions_are_at_no_distance():
    rows = torch.randn(5, 7).log_softmax(dim=-1)
    measured = distance([rows], [rows])
    assert (measured.mean, measured.max, measured.same_top) == (0, 0, 1)


def test_a_distance_by_hand():
    truth, actual = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log(), torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    expected = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    measured = distance([truth], [actual])
    assert measured.max == pytest.approx(expected, rel=1e-6)
    assert measured.mean == pytest.approx(expected / 2, rel=1e-6)
    assert measured.same_top == 0.5


def test_what_is_not_finite_is_infinitely_far():
    truth = torch.zeros(1, 2).log_softmax(dim=-1)
    assert distance([truth], [torch.full((1, 2), math.nan)]).max == math.inf


def test_perplexity_of_a_fair_choice():
    rows = torch.zeros(4, 8).log_softmax(dim=-1)
    assert perplexity([rows, rows], [[0, 1, 2, 3], [4, 5, 6, 7]]) == pytest.approx(8)
