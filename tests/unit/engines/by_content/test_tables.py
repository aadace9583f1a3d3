"""Rows of tokens in an engine's tensors."""

import pytest
import torch

from harness.engines.by_content.columns import RowLayout, RowOrder, layouts_with_rows


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


def side_by_side(values, width, side, arrange):
    """Pad the rows of requests to one width, [requests, width, 4, 3], with rows of NaN."""
    padded = torch.full((len(values), width, 4, 3), torch.nan)
    for row, value in zip(padded, values, strict=True):
        row[width - len(value) if side == "left" else 0 :][: len(value)] = value
    return arrange(padded)


@pytest.mark.parametrize(("side", "order"), [("left", RowOrder.PADDED_LEFT), ("right", RowOrder.PADDED_RIGHT)])
@pytest.mark.parametrize(
    ("arrange", "dim"),
    [(lambda x: x.flatten(2), 1), (lambda x: x.transpose(1, 2), 2), (lambda x: x.flatten(0, 1).flatten(1), 0)],
)
def test_rows_of_a_padded_batch(side, order, arrange, dim):
    values = [torch.randn(length, 4, 3) for length in (3, 5, 1)]
    rows = RowLayout(dim=dim).rows_of(side_by_side(values, 6, side, arrange), (3, 5, 1), order)
    assert torch.equal(rows, torch.cat(values).flatten(1))


def test_a_batch_of_other_requests_has_no_rows():
    for shape, dim in (((2, 6, 3), 1), ((3, 4, 3), 1), ((13, 3), 0)):
        assert RowLayout(dim=dim).rows_of(torch.ones(shape), (3, 5, 1), RowOrder.PADDED_LEFT) is None
