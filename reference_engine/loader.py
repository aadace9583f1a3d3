"""A model put on its device: weights, KV cache and attention backend, states, kernels, adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from reference_engine.attention.backend import AttentionBackend
from reference_engine.attention.select import find_backend
from reference_engine.cache_spec import CacheSpec, read_scales
from reference_engine.checkpoint.load import load_weights
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.config import EngineConfig
from reference_engine.families.build import build_decoder, open_rotaries
from reference_engine.families.parts import Parts
from reference_engine.families.state_cache import StateCache, StateSpec
from reference_engine.kernels import Kernels
from reference_engine.lora.adapter import Adapter, read_adapter
from reference_engine.model import Decoder
from reference_engine.tensor_parallel import TensorParallel

__all__ = ["LoadedModel", "find_kernels", "load_model", "resolve_cache_spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """All that one process holds of a model."""

    model_config: ModelConfig
    """Of this process's part of the model."""
    device: torch.device
    dtype: torch.dtype
    backend: AttentionBackend
    states: StateCache | None
    """Of recurrent layers."""
    kernels: Kernels
    decoder: Decoder
    adapters: Mapping[str, Adapter]
    """LoRA adapters by their names."""


def load_model(
    model_dir: str | Path,
    config: EngineConfig,
    model_config: ModelConfig,
    parallel: TensorParallel,
    adapters: Mapping[str, str | Path],
) -> LoadedModel:
    """Load a checkpoint; options that cannot be served are refused before its weights are read.

    Raises:
        ConfigError, CheckpointError, DeviceError, CapacityError: as `ModelRunner`.
    """
    shard = model_config.shard(parallel.size)
    device = parallel.open_device(config.device)
    dtype: torch.dtype = getattr(torch, config.resolve_dtype(model_config))
    config.resolve_max_model_len(model_config)
    state_spec = StateSpec.of(shard, dtype, device)
    spec = resolve_cache_spec(model_dir, config, shard, dtype, device)
    kernels = find_kernels()(config, spec, num_engines=parallel.size, has_adapters=bool(adapters))
    open_backend = find_backend(config.attention_backend, spec, kernels.backends)
    with_blocks = (name for name, backend in kernels.backends.items() if backend.has_blocks)
    config.check_prefix_caching(open_backend.has_blocks, with_blocks)
    rotary, local_rotary = open_rotaries(model_config, device, dtype)
    weights = load_weights(model_dir, model_config, dtype, device, parallel.rank, parallel.size)
    # After the weights, so that on a GPU the cache takes its part of what they leave.
    budget_bytes = parallel.cache_budget_bytes(device)
    backend = open_backend(replace(spec, budget_bytes=budget_bytes, prepare=kernels.prepare_cache))
    states = None if state_spec is None else StateCache.open(state_spec, backend, config)
    parts = Parts(
        config=shard,
        weights=weights,
        backend=backend,
        parallel=parallel,
        rotary=rotary,
        local_rotary=local_rotary,
        states=states,
        product=kernels.linears(weights, backend),
        quantised=kernels.quantised_linears(backend),
    )
    return LoadedModel(
        model_config=shard,
        device=device,
        dtype=dtype,
        backend=backend,
        states=states,
        kernels=kernels,
        decoder=build_decoder(parts),
        adapters={name: read_adapter(name, folder, shard, dtype, device) for name, folder in adapters.items()},
    )


def resolve_cache_spec(
    model_dir: str | Path, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> CacheSpec:
    """Return the sizes of the cache of this process's part of a model."""
    scales = read_scales(config, model_dir, model_config.attention_layers, model_config.latent is not None)
    state_spec = StateSpec.of(model_config, dtype, device)
    state_bytes = 0 if state_spec is None else state_spec.num_bytes
    return CacheSpec.of(config, model_config, scales, dtype=dtype, device=device, state_bytes=state_bytes)


def find_kernels() -> type[Kernels]:
    """Return those of the room `fast` where it is there, else the plain ones."""
    try:
        from reference_engine.fast.fast_kernels import FastKernels
    except ModuleNotFoundError as error:
        if error.name != "reference_engine.fast":
            raise
        return Kernels
    return FastKernels
