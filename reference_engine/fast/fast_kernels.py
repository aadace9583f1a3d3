"""The fast way to do what `Kernels` does the plain way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from reference_engine.attention.backend import AttentionBackend
from reference_engine.attention.select import BACKENDS, BackendClass
from reference_engine.batch import Batch
from reference_engine.cache_spec import CacheSpec
from reference_engine.config import EngineConfig
from reference_engine.errors import ConfigError
from reference_engine.families.quantised import QuantisedLinear
from reference_engine.fast.attention.cpp import CppAttention
from reference_engine.fast.attention.triton import TritonAttention
from reference_engine.fast.attention.varlen import VarlenAttention
from reference_engine.fast.compiled import CompiledDecoder
from reference_engine.fast.fused import FusedDecoder, is_fusable
from reference_engine.fast.graphs import Capture, CudaCapture, DecodeGraphs, is_capturable
from reference_engine.fast.huge_pages import prefer_huge_pages
from reference_engine.fast.products import Products, with_row_kernel
from reference_engine.fast.quantised import with_quantised_kernels
from reference_engine.fast.row_way import with_row_way
from reference_engine.kernels import Kernels
from reference_engine.layers import Linear
from reference_engine.model import Decoder, Forward

__all__ = ["FastKernels"]


class FastKernels(Kernels):
    """Kernels, packed weights, huge pages and recorded steps, as the engine's options ask for them."""

    backends: Mapping[str, BackendClass] = {
        "triton": TritonAttention, "cpp": CppAttention, "varlen": VarlenAttention, **BACKENDS,
    }  # fmt: skip

    def __init__(
        self, config: EngineConfig, spec: CacheSpec, *, num_engines: int = 1, has_adapters: bool = False
    ) -> None:
        super().__init__(config, spec, num_engines=num_engines, has_adapters=has_adapters)
        self._products: Products | None = None
        self._graphs: DecodeGraphs | None = None
        if has_adapters:
            _refuse_adapters(config)

    def prepare_cache(self, memory: torch.Tensor) -> None:
        """See `Kernels.prepare_cache`."""
        prefer_huge_pages(memory)

    def linears(
        self, weights: Mapping[str, torch.Tensor], backend: AttentionBackend
    ) -> Callable[[torch.Tensor, torch.Tensor | None], Linear]:
        """See `Kernels.linears`."""
        kernel = getattr(_operators(backend), "linear", None)
        if isinstance(backend, TritonAttention):
            return Linear if self.config.compile_layers else partial(with_row_kernel, backend.operators.linear)
        if kernel is not None:
            kernel = with_row_way(kernel, self.spec.dtype)
        self._products = Products.of(self.config, weights, self.spec.dtype, kernel, self.num_engines)
        return self._products

    def quantised_linears(self, backend: AttentionBackend) -> QuantisedLinear:
        """See `Kernels.quantised_linears`."""
        if isinstance(backend, TritonAttention) and not self.config.compile_layers:
            return partial(with_quantised_kernels, backend.operators)
        return super().quantised_linears(backend)

    def decoder(self, decoder: Decoder, backend: AttentionBackend) -> Forward:
        """See `Kernels.decoder`."""
        if self._products is not None:
            self._products.finish()
        is_wanted = self.config.cuda_graphs and self.spec.device.type == "cuda" and not self.has_adapters
        if is_wanted and isinstance(backend, TritonAttention) and is_capturable(decoder):
            self.record(backend, CudaCapture(self.spec.device))
        if self.config.compile_layers:
            return CompiledDecoder.of(decoder)
        operators = _operators(backend)
        self.is_fused = self.config.fused_kernels and operators is not None and is_fusable(decoder)
        return FusedDecoder.of(decoder, operators) if self.is_fused else decoder

    def record(self, backend: AttentionBackend, capture: Capture) -> DecodeGraphs:
        """Record decode steps with `capture` from now on, and replay them; return what does so."""
        self._graphs = DecodeGraphs(
            max_num_seqs=self.spec.max_num_seqs,
            max_blocks=-(-self.spec.max_model_len // backend.block_size),
            device=self.spec.device,
            capture=capture,
        )
        self.replays_graphs = True
        return self._graphs

    def run(self, forward: Forward, batch: Batch) -> torch.Tensor | None:
        """See `Kernels.run`."""
        if self._graphs is not None and (batch.observer is None or self.config.watch_graphs):
            logits_RV = self._graphs.run(forward, batch)
            if logits_RV is not None:
                return logits_RV
        return forward(batch)


def _operators(backend: AttentionBackend) -> Any | None:
    """Return the kernels that a backend runs, among them those for a decoder's small operations; None: it has none."""
    return backend.operators if isinstance(backend, CppAttention | TritonAttention) else None


def _refuse_adapters(config: EngineConfig) -> None:
    has_kernels = config.attention_backend in ("cpp", "triton")
    others = {
        "compile_layers": config.compile_layers,
        f"fused_kernels with the backend {config.attention_backend}": config.fused_kernels and has_kernels,
    }
    for name in (name for name, is_on in others.items() if is_on):
        raise ConfigError("adapters are not served with this", where="EngineConfig", expected="off", actual=name)
