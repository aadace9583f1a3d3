"""The share of the model that this process computes: all of it, or what `parallel` gives to one rank of several.

Shapes: T tokens, D hidden, V vocab, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from reference_engine.cache_spec import cache_budget_bytes
from reference_engine.device import open_device
from reference_engine.layers import Embedding, Linear
from reference_engine.observer import Observer
from reference_engine.requests.sequence import ScheduledChunk, Sequence

__all__ = ["TensorParallel"]


class TensorParallel:
    """All of the model, in the only process that there is."""

    rank = 0
    size = 1
    """Processes that share the model."""

    def open_device(self, name: str) -> torch.device:
        """Return the device of this process.

        Raises:
            DeviceError: it is not there.
        """
        return open_device(name)

    def cache_budget_bytes(self, device: torch.device) -> int:
        """Return what a KV cache without a given size may take."""
        return cache_budget_bytes(device)

    def embedding(self, table_VD: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what makes rows [T, D] of token ids [T]; the table has this share's rows."""
        return Embedding(table_VD)

    def row_parallel(self, product: Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what makes [T, O] of this share's inputs [T, I]."""
        return product

    def head(self, product: Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what makes logits [T, V] of rows [T, D]; the product has this share's outputs."""
        return product

    def watching(self, observer: Observer) -> Observer:
        """Return what shows `observer` whole taps of this share's parts."""
        return observer

    def tell_step(self, computed: Seq[ScheduledChunk], is_observed: bool) -> None:
        """Let the other processes compute their shares of a step."""

    def tell_copy(self, source: int, target: int) -> None:
        """Let them copy a block."""

    def tell_read_back(self, sequence: Sequence) -> None:
        """Let them show what their caches hold of a request."""
