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


def chosen_positions(chosen: torch.Tensor, scores: torch.Tensor, width: int) -> torch.Tensor:
    """Return which of the tokens so far were chosen, [..., width]: -1 for what is masked, and where there are too few.

    Args:
        chosen: [..., k] indices.
        scores: [..., n] by which they were chosen.
        width: what k is where there are enough tokens.
    """
    is_masked = scores.gather(-1, chosen) <= torch.finfo(scores.dtype).min / 2
    return torch.nn.functional.pad(chosen.masked_fill(is_masked, -1), (0, width - chosen.shape[-1]), value=-1)


def choice_of_positions(positions: torch.Tensor, like: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return positions [..., width] as indices of the shape of `like`: one of the row's own in the place of -1."""
    rows = positions.sort(dim=-1, descending=True).values[..., : like.shape[-1]].reshape(like.shape)
    return torch.where(rows < 0, rows[..., :1], rows).clamp(0, num_tokens - 1)


def from_rows(rows: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    """Return rows in the shape of the tensor that they were made of by `as_rows`."""
    if dim != 2:
        return rows.reshape(like.shape)
    shape = (like.shape[0], like.shape[2], like.shape[1], *like.shape[3:])
    return rows.reshape(shape).transpose(1, 2)
