"""What the digits of a column leave open."""

import torch

from harness.extensions.rollout.side import decimal_places, resolution


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_decimal_places_are_those_of_the_column_itself():
    assert decimal_places(column(-0.25, -1.5, 0.0)) == 2
    assert decimal_places(column(-0.123456789, -1.5)) is None
    assert decimal_places(column(0.0)) is None
    assert resolution(column(-0.25, -1.5)).tolist() == [0.005, 0.005]


def test_a_column_in_bfloat16_is_known_by_its_values():
    values = column(-0.123456789, -2.3456789).to(torch.bfloat16).double()
    assert resolution(values).tolist() == (values.abs() * 2**-8).tolist()
    assert resolution(column(-0.123456789)).tolist() == [0.0]
