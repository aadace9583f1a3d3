"""Which dimension counts the tokens, and a tensor as rows and back."""

import pytest
import torch

from harness.oracle.watch import as_rows, choice_of_positions, chosen_positions, from_rows, token_dim

SHAPES = [
    ((2, 11, 6), 1, (22, 6)),
    ((2, 11), 1, (22,)),
    ((2, 11, 3, 4), 1, (22, 3, 4)),
    ((2, 3, 11, 4), 2, (22, 3, 4)),
    ((22, 6), 0, (22, 6)),
    ((22, 2, 3), 0, (22, 2, 3)),
]
"""Shapes of two requests of eleven tokens, the dimension of the tokens, and the rows."""


@pytest.mark.parametrize(("shape", "dim", "rows"), SHAPES)
def test_the_dimension_of_the_tokens(shape, dim, rows):
    assert token_dim(torch.zeros(shape), 2, 11) == dim


@pytest.mark.parametrize("shape", [(11, 6), (2, 6, 7), (1, 11, 4), (2, 4, 11, 11), (6,), (2,), (0, 3)])
def test_what_has_no_rows_of_tokens(shape):
    """Tables of positions, masks and probabilities."""
    assert token_dim(torch.zeros(shape), 2, 11) is None


@pytest.mark.parametrize(("shape", "dim", "rows"), SHAPES)
def test_rows_and_back(shape, dim, rows):
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    flat_rows = as_rows(x, dim, 2, 11)
    assert flat_rows.shape == rows
    assert torch.equal(from_rows(flat_rows, x, dim), x)
    request, token = 1, 4
    expected = x[request * 11 + token] if dim == 0 else x[request, token] if dim == 1 else x[request, :, token]
    assert torch.equal(flat_rows[request * 11 + token], expected)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((2, 11), 1), ((3, 11), None), ((2, 5, 11), 2), ((3, 5, 11), None), ((22,), None), ((22, 3), 0), ((44, 3), 0),
        ((33, 3), None), ((0, 22), None), ((2, 3, 4, 11), None), ((11, 2), None), ((2, 11, 11), None), ((22, 11), 0),
        ((2, 22), None), ((1, 22, 11), None),
    ],
)  # fmt: skip
def test_which_dimension_counts_two_requests_of_eleven_tokens(shape, dim):
    assert token_dim(torch.zeros(shape), 2, 11) == dim


@pytest.mark.parametrize(("num_requests", "num_tokens"), [(1, 1), (1, 7), (7, 1)])
def test_one_request_or_one_token(num_requests, num_tokens):
    x = torch.zeros(num_requests, num_tokens, 5)
    assert token_dim(x, num_requests, num_tokens) == (None if num_tokens == 1 and num_requests == 1 else 1)


def test_several_rows_for_each_token_are_one_row():
    """Experts that each token is sent to, one after the other."""
    x = torch.arange(66.0).view(33, 2)
    rows = as_rows(x, 0, 1, 11)
    assert rows.tolist() == x.view(11, 6).tolist()
    assert torch.equal(from_rows(rows, x, 0), x)


def test_a_choice_among_tokens_leaves_out_what_is_masked() -> None:
    scores = torch.tensor([[3.0, 1.0, -torch.inf, -torch.inf], [1.0, 2.0, 4.0, 3.0]])
    chosen = scores.topk(3).indices

    positions = chosen_positions(chosen, scores, 5)

    assert positions.tolist() == [[0, 1, -1, -1, -1], [2, 3, 1, -1, -1]]
    assert choice_of_positions(positions, chosen, 4).sort(dim=1).values.tolist() == [[0, 1, 1], [1, 2, 3]]
