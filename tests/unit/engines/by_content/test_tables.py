"""Rows of tokens in an engine's tensors."""

import pytest
import torch

from harness.engines.by_content.tables import RowLayout, layouts_with_rows


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((7, 5), [RowLayout(dim=0)]),
        ((8, 5), [RowLayout(dim=0)]),  # padded
        ((1, 7, 5), [RowLayout(dim=1)]),
        ((1, 4, 7, 3), [RowLayout(dim=2)]),
        ((28, 3), [RowLayout(dim=0, parts=4)]),
        ((32, 3), [RowLayout(dim=0, parts=4)]),  # padded
        ((7, 7), [RowLayout(dim=0), RowLayout(dim=1)]),
        ((5, 3), []),
        ((), []),
    ],
)
def test_where_the_rows_may_be(shape, expected):
    assert [layout for layout, _rows in layouts_with_rows(torch.ones(shape), 7)] == expected


@pytest.mark.parametrize(
    "arrange",
    [
        lambda x: x.flatten(1),
        lambda x: torch.cat([x.flatten(1), torch.ones(2, 12)]),
        lambda x: x.flatten(1)[None],
        lambda x: x.transpose(0, 1)[None],
        lambda x: x.reshape(28, 3),
    ],
)
def test_the_rows_are_the_same_in_every_layout(arrange):
    value = torch.randn(7, 4, 3)
    tensor = arrange(value)
    assert any(torch.equal(rows, value.flatten(1)) for _layout, rows in layouts_with_rows(tensor, 7))


def test_less_rows_are_none():
    assert RowLayout(dim=0).rows(torch.ones(6, 2), 7) is None
    assert RowLayout(dim=2).rows(torch.ones(7, 2), 7) is None
    assert RowLayout(dim=0, parts=4).rows(torch.ones(29, 2), 7) is None
