"""Rows of HF's tensors: which dimension counts the tokens, and a tensor as rows and back."""

import torch


def token_dim(tensor: torch.Tensor, num_requests: int, num_tokens: int) -> int | None:
    """Return which dimension counts the tokens: 1, 2 after heads, 0 if requests and tokens are one; None for none.

    Args:
        tensor: any of a forward's.
        num_requests: size of the batch.
        num_tokens: tokens of each request, padding included.
    """
    shape = tensor.shape
    if sum(size == num_tokens for size in shape) > 1:  # probabilities of attention: one for each key
        return None
    if len(shape) >= 2 and shape[0] == num_requests:
        if shape[1] == num_tokens:
            return 1
        if len(shape) >= 3 and shape[2] == num_tokens:
            return 2
    if len(shape) >= 2 and shape[0] and shape[0] % (num_requests * num_tokens) == 0:
        return 0
    return None


def as_rows(tensor: torch.Tensor, dim: int, num_requests: int, num_tokens: int) -> torch.Tensor:
    """Return [requests * tokens, ...] of a tensor whose dimension `dim` counts the tokens; a view if it can be."""
    if dim == 2:
        tensor = tensor.transpose(1, 2)
    if dim == 0 and tensor.shape[0] == num_requests * num_tokens:
        return tensor
    rest = tensor.shape[2:] if dim else (-1,)
    return tensor.reshape(num_requests * num_tokens, *rest)


def from_rows(rows: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    """Return rows in the shape of the tensor that they were made of by `as_rows`."""
    if dim != 2:
        return rows.reshape(like.shape)
    shape = (like.shape[0], like.shape[2], like.shape[1], *like.shape[3:])
    return rows.reshape(shape).transpose(1, 2)
