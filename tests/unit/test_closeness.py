"""Two orders of a sum are near, and what a bug changes is not."""

import pytest
import torch

from harness.errors import Code
from harness.results.check import Divergence, Verdict

from ..closeness import TERMS, assert_near, near, near_roundings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_another_order_are_near_and_a_part_in_a_thousand_is_not(dtype):
    terms = torch.randn(50, TERMS, dtype=dtype, generator=torch.Generator().manual_seed(0))
    sums, reversed_sums = terms.sum(dim=1), terms.flip(1).cumsum(dim=1)[:, -1]
    assert not torch.equal(sums, reversed_sums)
    assert_near(reversed_sums, sums)
    with pytest.raises(AssertionError):
        assert_near(sums * 1.001, sums)


def test_nan_and_other_dtypes_are_not_near():
    one = torch.ones(2)
    for different in (torch.tensor([1.0, torch.nan]), one.double()):
        with pytest.raises(AssertionError):
            assert_near(different, one)


def test_floats_of_a_record_are_near_and_all_else_is_equal():
    fields = {"tap": "x", "request": 2, "position": 8, "verdict": Verdict.BUG, "code": Code.LOCAL_ERROR}
    expected = Divergence(local_roundings=394215.25403655804, bound_roundings=17.0, **fields)
    assert Divergence(local_roundings=394215.2540365605, bound_roundings=17.0, **fields) == near(expected)
    assert Divergence(local_roundings=394215.255, bound_roundings=17.0, **fields) != near(expected)
    assert Divergence(local_roundings=394215.25403655804, bound_roundings=17.0, **fields | {"position": 9}) != near(
        expected
    )


def test_local_errors_have_room_of_the_truths_own_roundings():
    assert near_roundings([1e-7, 1.5], torch.float32) == [0.0, 1.5]
    assert near_roundings([1e-4, 1.5], torch.float32) != [0.0, 1.5]
    assert near([1e-7]) != [0.0]
