"""The model on its device: weights, KV cache and attention, and the forward of one step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch

from reference_engine.attention.backend import BACKENDS, find_backend
from reference_engine.batch import build_batch
from reference_engine.checkpoint import load_weights
from reference_engine.config import DTYPES, EngineConfig, ModelConfig
from reference_engine.device import open_device
from reference_engine.errors import ConfigError
from reference_engine.kv_cache import CacheSpec
from reference_engine.model import Decoder
from reference_engine.observer import Observer
from reference_engine.rotary import RotaryEmbedding
from reference_engine.sampler import Sampled, sample
from reference_engine.sequence import Chunk, Sequence
from reference_engine.steps import describe, show_cache

__all__ = ["ModelRunner"]


class ModelRunner:
    """Everything that touches the device.

    Raises:
        ConfigError: `config` asks for more than the model or the backend can do.
        CheckpointError: the weights are absent, damaged, or contradict config.json.
        DeviceError: the device is not there.
        CapacityError: the KV cache does not fit into memory.
    """

    def __init__(self, model_dir: str | Path, config: EngineConfig, model_config: ModelConfig) -> None:
        self.model_config = model_config
        self.device = open_device(config.device)
        self.dtype = _resolve_dtype(config, model_config)
        self.max_model_len = _resolve_max_model_len(config, model_config)
        spec = self._cache_spec(config)
        open_backend = find_backend(config.attention_backend, spec)
        if config.enable_prefix_caching and not open_backend.has_blocks:
            raise ConfigError(
                "prefix caching needs blocks", where="EngineConfig.enable_prefix_caching",
                expected=f"attention_backend {' or '.join(name for name, own in BACKENDS.items() if own.has_blocks)}",
                actual=config.attention_backend,
            )  # fmt: skip
        rotary = RotaryEmbedding(model_config, self.device, self.dtype)
        weights = load_weights(model_dir, model_config, self.dtype, self.device)
        # After the weights, so that on a GPU the cache takes its share of what they leave.
        self.backend = open_backend(spec)
        self.model = Decoder.build(model_config, weights, rotary, self.backend)

    @torch.no_grad()
    def run(self, chunks: Seq[Chunk], observer: Observer | None) -> Sampled:
        """Compute the chunks and choose the next token of each that has caught up."""
        computed = chunks if self.backend.cache is not None else [replace(chunk, start=0) for chunk in chunks]
        batch = build_batch(computed, self.backend.block_size, self.device, observer)
        batch = replace(batch, plan=self.backend.plan(batch))
        if observer is not None:
            observer.begin_step(describe(chunks, computed, self.backend))
        logits_RV = self.model(batch)
        sequences = [chunk.sequence for chunk in chunks if chunk.samples]
        sampled = Sampled([], []) if logits_RV is None else sample(logits_RV, sequences)
        if observer is not None:
            observer.end_step(sampled.token_ids)
        return sampled

    @torch.no_grad()
    def read_back(self, sequence: Sequence, observer: Observer | None) -> None:
        """Show an observer what the cache holds of a request."""
        if observer is not None and self.backend.cache is not None and sequence.num_computed_tokens:
            show_cache(sequence, self.backend, self.model_config.num_hidden_layers, observer)

    def copy_block(self, source: int, target: int) -> None:
        """Copy the K and V of one block to another."""
        if self.backend.cache is not None:
            self.backend.cache.copy_block(source, target)

    def _cache_spec(self, config: EngineConfig) -> CacheSpec:
        return CacheSpec(
            num_layers=self.model_config.num_hidden_layers,
            num_kv_heads=self.model_config.num_key_value_heads,
            head_dim=self.model_config.head_dim,
            dtype=self.dtype,
            device=self.device,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            layer_windows=self.model_config.layer_windows,
        )


def _resolve_dtype(config: EngineConfig, model_config: ModelConfig) -> torch.dtype:
    name = (model_config.dtype or "float32") if config.dtype == "auto" else config.dtype
    if name not in DTYPES:
        raise ConfigError(
            "the checkpoint's dtype is not supported", where="config.json", expected=" or ".join(DTYPES), actual=name,
            hint="Name one with EngineConfig.dtype.",
        )  # fmt: skip
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _resolve_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            "max_model_len is more than the model allows", where="EngineConfig.max_model_len",
            expected=f"at most max_position_embeddings = {limit}", actual=config.max_model_len,
        )  # fmt: skip
    return config.max_model_len or limit
