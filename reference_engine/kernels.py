"""What makes the engine faster, as the core sees it: the few things that can also be done in another way.

`Kernels` does them the plain way. The room `fast` does them in its own way; `loader` looks for it, and is the only
place of the core that names it. Without that room everything runs as it is written here.

Shapes: O outputs, I inputs, R sampled rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from reference_engine.attention.backend import AttentionBackend
from reference_engine.attention.select import BACKENDS, BackendClass
from reference_engine.batch import Batch
from reference_engine.cache_spec import CacheSpec
from reference_engine.config import EngineConfig
from reference_engine.families.quantised import QuantisedLinear, quantised_linear
from reference_engine.layers import Linear
from reference_engine.model import Decoder, Forward

__all__ = ["Kernels"]


class Kernels:
    """The plain way: torch, one operation after the other.

    `num_engines` are opened on this machine together and share its memory. `has_adapters` says whether LoRA adapters
    are served, whose part every product must add (`Batch.adapt`).

    Raises:
        ConfigError: `config` asks for products that leave the adapters' part out.
    """

    backends: Mapping[str, BackendClass] = BACKENDS
    """The attention backends to choose from."""

    def __init__(
        self, config: EngineConfig, spec: CacheSpec, *, num_engines: int = 1, has_adapters: bool = False
    ) -> None:
        self.config, self.spec = config, spec
        self.num_engines, self.has_adapters = num_engines, has_adapters
        self.is_fused = False
        """Whether several small operations of a layer are one, so that their taps come together."""
        self.replays_graphs = False
        """Whether decode steps without an observer are recorded once and replayed."""

    @property
    def changes_when_observed(self) -> bool:
        """Whether steps without an observer run other code than those with one: recorded steps, compiled layers."""
        return (self.replays_graphs and not self.config.watch_graphs) or self.config.compile_layers

    def prepare_cache(self, memory: torch.Tensor) -> None:
        """Prepare the memory of a KV cache before it is first touched."""

    def linears(
        self, weights: Mapping[str, torch.Tensor], backend: AttentionBackend
    ) -> Callable[[torch.Tensor, torch.Tensor | None], Linear]:
        """Return what makes a product of a weight [O, I] and a bias [O]; `weights` are all that the model has."""
        return Linear

    def quantised_linears(self, backend: AttentionBackend) -> QuantisedLinear:
        """Return what makes a product of a quantised weight."""
        return quantised_linear

    def decoder(self, decoder: Decoder, backend: AttentionBackend) -> Forward:
        """Return what computes of a batch what `decoder` does."""
        return decoder

    def run(self, forward: Forward, batch: Batch) -> torch.Tensor | None:
        """Return what `forward` makes of a batch: the logits [R, V], valid until the next step."""
        return forward(batch)
