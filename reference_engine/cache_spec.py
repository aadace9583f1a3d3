"""The sizes of a model's KV cache, from its config and the engine's options; `kv_cache` allocates it.

Shapes: S slots in a block, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reference_engine.checkpoint.load import read_cache_scales
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.config import EngineConfig
from reference_engine.errors import ConfigError

__all__ = ["CacheSpec", "cache_budget_bytes", "read_scales"]

# Without num_blocks: on the CPU, where untouched memory costs nothing, and on a GPU, as a share of what is free.
CPU_CACHE_BYTES = 1 << 30
CUDA_CACHE_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The sizes that a backend needs to lay out its cache."""

    num_layers: int
    """Those that keep K and V."""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int
    num_blocks: int | None
    """None: as many as the limits below can use, within a share of the memory."""
    max_num_seqs: int
    max_model_len: int
    layer_windows: tuple[int | None, ...]
    """Latest tokens that each layer sees; None: all of them."""
    budget_bytes: int = CPU_CACHE_BYTES
    """Memory for a cache without `num_blocks`."""
    value_dim: int | None = None
    """Of values that are the first part of the keys and not stored again; None: values are as wide as keys."""
    score_scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(H)."""
    state_bytes: int = 0
    """Beside K and V of a block, the states that are kept with it."""
    stored_dtype: torch.dtype | None = None
    """A float8, to which K and V are rounded when they are stored; None: `dtype`."""
    scales: tuple[tuple[float, float], ...] = ()
    """Of K and of V for each layer: what they are divided by before that; none: 1."""
    prepare: Callable[[torch.Tensor], None] = lambda memory: None
    """Called with the cache's memory before it is first touched."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        scales: tuple[tuple[float, float], ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        state_bytes: int,
    ) -> CacheSpec:
        """Return the sizes that a model's config and the engine's options ask for."""
        layers, latent = model_config.attention_layers, model_config.latent
        return cls(
            num_layers=len(layers),
            num_kv_heads=model_config.num_key_value_heads if latent is None else 1,
            head_dim=model_config.head_dim if latent is None else latent.cached_dim,
            value_dim=None if latent is None else latent.rank,
            score_scale=None if latent is None else model_config.score_scale,
            dtype=dtype,
            device=device,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.resolve_max_model_len(model_config),
            layer_windows=tuple(model_config.layer_windows[layer] for layer in layers),
            state_bytes=state_bytes,
            stored_dtype=None if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype),
            scales=scales,
        )

    @property
    def kept_dtype(self) -> torch.dtype:
        """Return what K and V are stored in."""
        return self.dtype if self.stored_dtype is None else self.stored_dtype

    @property
    def num_streams(self) -> int:
        """Tensors that are stored of a token in a layer: K and V, or K alone."""
        return 2 if self.value_dim is None else 1

    @property
    def scaling(self) -> dict[str, Any]:
        """Return the argument of torch's attention beside its tensors and its window, where there is one."""
        return {} if self.score_scale is None else {"scale": self.score_scale}

    def default_num_blocks(self, block_size: int) -> int:
        """Count the blocks, the null block included, that the limits can use and the memory can hold."""
        wanted = self.max_num_seqs * -(-self.max_model_len // block_size)
        num_heads = self.num_streams * self.num_layers * block_size * self.num_kv_heads
        block_bytes = num_heads * self.head_dim * self.kept_dtype.itemsize + self.state_bytes
        return 1 + max(1, min(wanted, self.budget_bytes // block_bytes))


def cache_budget_bytes(device: torch.device, *, num_engines: int = 1) -> int:
    """Return what each of `num_engines` that are opened on a device at the same time may take for its cache."""
    if device.type == "cpu":
        return CPU_CACHE_BYTES
    num_free_bytes, _ = torch.cuda.mem_get_info(device)
    # What torch keeps for its next tensors is free, too.
    num_free_bytes += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(CUDA_CACHE_SHARE * num_free_bytes) // num_engines


def read_scales(
    config: EngineConfig, model_dir: str | Path, layers: Seq[int], has_latents: bool
) -> tuple[tuple[float, float], ...]:
    """Return the scales of K and of V for each layer, of a cache in another dtype; none: they are stored as they are.

    Raises:
        ConfigError: there are scales without such a dtype, or not of all layers, or latents would be cached so.
        CheckpointError: the checkpoint's own scales are not one of K and one of V for each layer.
    """
    scales = config.kv_cache_scales
    if config.kv_cache_dtype != "auto" and has_latents:
        raise ConfigError(
            "latents are not kept in another dtype", where="EngineConfig.kv_cache_dtype", expected="auto",
            actual=config.kv_cache_dtype,
        )  # fmt: skip
    if not scales and config.kv_cache_dtype != "auto":
        return read_cache_scales(model_dir, layers)
    if scales and (config.kv_cache_dtype == "auto" or len(scales) != len(layers)):
        raise ConfigError(
            "scales of a KV cache that has none, or not of all layers", where="EngineConfig.kv_cache_scales",
            expected=f"those of {len(layers)} layers, and a kv_cache_dtype", actual=f"{len(scales)} layers, "
            f"kv_cache_dtype={config.kv_cache_dtype}",
        )  # fmt: skip
    return tuple((float(k), float(v)) for k, v in scales)
