"""The decoder with layers that torch's compiler has fused, for steps without an observer.

Shapes: R sampled rows, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from reference_engine.batch import Batch
from reference_engine.model import Decoder

__all__ = ["CompiledDecoder"]

_VERSIONS_OF_A_LAYER = 4
"""Compiled ones: of one row, of several, of one request, of several."""


@dataclass(frozen=True, slots=True)
class CompiledDecoder:
    """A decoder twice, on the same weights: as it is written, and compiled."""

    plain: Decoder
    compiled: Decoder

    @classmethod
    def of(cls, decoder: Decoder) -> CompiledDecoder:
        """Compile the layers for any number of rows, when they first run."""
        # All layers share one piece of code, of which each is a version of its own, and a few more for shapes.
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, _VERSIONS_OF_A_LAYER * len(decoder.layers))
        layers = tuple(torch.compile(layer.__call__, dynamic=True) for layer in decoder.layers)
        return cls(decoder, replace(decoder, layers=layers))

    def __call__(self, batch: Batch) -> torch.Tensor | None:
        """Return the logits [R, V], or None when no row is sampled."""
        return (self.compiled if batch.observer is None else self.plain)(batch)
