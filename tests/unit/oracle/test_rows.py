"""Which dimension counts the tokens, and a tensor as rows and back."""

import pytest
import torch

from harness.oracle.rows import as_rows, from_rows, token_dim

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
    found = as_rows(x, dim, 2, 11)
    assert found.shape == rows
    assert torch.equal(from_rows(found, x, dim), x)
    request, token = 1, 4
    own = x[request * 11 + token] if dim == 0 else x[request, token] if dim == 1 else x[request, :, token]
    assert torch.equal(found[request * 11 + token], own)
