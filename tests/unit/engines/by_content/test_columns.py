"""Rows of tokens and columns of values in an engine's tensors."""

import pytest
import torch

from harness.engines.by_content.columns import ColumnIndex, Columns, RowLayout, layouts_with_rows

ROWS = 31
ROUNDING = 2.5e-8


@pytest.fixture
def tables(seeded):
    return [torch.randn(ROWS, width, generator=seeded) for width in (24, 96, 40, 24, 130)]


@pytest.fixture
def seeded():
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize(
    ("columns", "is_rising"),
    [
        (range(96), True),  # the whole
        (range(20, 52), True),  # a slice of a fused product
        (range(1, 96, 2), True),  # interleaved with another
        ([*range(8), *range(40, 48)], True),  # heads, packed with others
        ([at // 2 + at % 2 * 16 for at in range(32)], False),  # halves of a head, interleaved
    ],
)
def test_columns_are_found_wherever_they_lie(tables, columns, is_rising):
    value = tables[1][:, list(columns)]
    (fit,) = ColumnIndex(tables, rounding=ROUNDING).find(value)
    assert fit.index == 1
    assert torch.equal(fit.columns.of(tables[1]), value)
    assert fit.columns.is_rising is is_rising


@pytest.mark.parametrize("gain", [1.0003, 0.97])
def test_what_is_a_little_wrong_is_found_too(tables, gain):
    (fit,) = ColumnIndex(tables, rounding=ROUNDING).find(tables[2] * gain)
    assert (fit.index, fit.columns) == (2, Columns(start=0, stop=40))
    assert fit.error == pytest.approx(abs(1 / gain - 1), rel=0.2)


def test_nothing_is_found_of_another_value(tables, seeded):
    index = ColumnIndex(tables, rounding=ROUNDING)
    for width in (1, 2, 24, 96):
        assert index.find(torch.randn(ROWS, width, generator=seeded)) == []


@pytest.mark.parametrize("change", ["two columns", "a row", "twice as much", "wider"])
def test_what_is_partly_another_value_is_not_taken(tables, change):
    value = tables[1].clone()
    if change == "two columns":
        value[:, [4, 90]] = value[:, [90, 4]] + 1
    elif change == "a row":
        value[7] = -value[7]
    elif change == "twice as much":
        value *= 2
    else:
        value = torch.cat([value, value[:, :3] + 1], dim=1)
    assert [fit.index for fit in ColumnIndex(tables, rounding=ROUNDING).find(value)] == []


def test_rounding_is_no_difference_and_the_nearest_comes_first(tables):
    rounded = [table.to(torch.bfloat16).float() for table in tables]
    rounded.append(rounded[4] * 1.01)
    fits = ColumnIndex(rounded, rounding=1.7e-3).find(tables[4])
    assert [fit.index for fit in fits] == [4, 5]
    assert fits[0].error < fits[1].error


@pytest.mark.parametrize("value", [torch.zeros(ROWS, 4), torch.full((ROWS, 4), torch.nan)])
def test_zeros_and_no_numbers_are_nobodys_value(tables, value):
    assert ColumnIndex([*tables, torch.zeros(ROWS, 8)], rounding=ROUNDING).find(value) == []


def test_a_tensor_with_no_number_in_it_is_none_that_holds_a_value(tables):
    broken = [tables[0], tables[1].clone()]
    broken[1][3, 5] = torch.nan
    index = ColumnIndex(broken, rounding=ROUNDING)
    assert index.find(tables[1]) == []
    assert [fit.index for fit in index.find(tables[0])] == [0]


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
