"""Choosing the next token from logits.

Shapes: R sampled rows, V vocab.
"""

from __future__ import annotations

import torch

__all__ = ["sample"]


def sample(logits_RV: torch.Tensor) -> torch.Tensor:
    """Return [R] int64: the likeliest token of each row, the lowest id among equals."""
    return logits_RV.argmax(dim=-1)
