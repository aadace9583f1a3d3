"""The model on its device: weights, KV cache and attention, and the forward of one step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import torch

from reference_engine.acceleration import Acceleration
from reference_engine.attention.backend import find_backend
from reference_engine.batch import Batch, build_batch, slots_of
from reference_engine.checkpoint.load import load_weights, read_cache_scales
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.config import DTYPES, EngineConfig
from reference_engine.errors import ConfigError
from reference_engine.kv_cache import CacheSpec
from reference_engine.lora.adapter import read_adapter
from reference_engine.model import Decoder
from reference_engine.numerics import step_numerics
from reference_engine.observer import Observer
from reference_engine.observing.steps import describe, show_cache, show_states
from reference_engine.requests.sequence import ScheduledChunk, Sequence
from reference_engine.rotary import RotaryEmbedding
from reference_engine.sampler import Sampled, sample
from reference_engine.share import Share
from reference_engine.state_cache import StateCache, StateSpec

__all__ = ["ModelRunner"]


class ModelRunner:
    """Everything that touches the device.

    Raises:
        ConfigError: `config` asks for more than the model or the backend can do.
        CheckpointError: the weights are absent, damaged, or contradict config.json.
        DeviceError: the device is not there.
        CapacityError: the KV cache does not fit into memory.
    """

    def __init__(
        self,
        model_dir: str | Path,
        config: EngineConfig,
        model_config: ModelConfig,
        ranks: Share | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        self.shows_operations = True
        """Whether an observer sees every intermediate. If not, it sees the logits, and steps run as without it."""
        _check_adapters(adapters or {}, ranks, model_config)
        _check_compiled(config, model_config)
        self._share = share = Share() if ranks is None else ranks
        self.model_config = model_config.shard(share.size)
        self.device = share.open_device(config.device)
        self._numerics = step_numerics if self.device.type == "cuda" else nullcontext
        self.dtype = _resolve_dtype(config, model_config)
        self.max_model_len = _resolve_max_model_len(config, model_config)
        self._state_spec = _state_spec(self.model_config, self.dtype, self.device)
        spec = self._cache_spec(config, model_dir)
        self.acceleration = acceleration = find_acceleration()(
            config, spec, num_engines=share.size, has_adapters=bool(adapters)
        )
        open_backend = find_backend(config.attention_backend, spec, acceleration.backends)
        if config.enable_prefix_caching and not open_backend.has_blocks:
            with_blocks = [name for name, own in acceleration.backends.items() if own.has_blocks]
            raise ConfigError(
                "prefix caching needs blocks", where="EngineConfig.enable_prefix_caching",
                expected=f"attention_backend {' or '.join(with_blocks)}", actual=config.attention_backend,
            )  # fmt: skip
        rotary, local_rotary = self._open_rotary(model_config)
        weights = load_weights(model_dir, model_config, self.dtype, self.device, share.rank, share.size)
        # After the weights, so that on a GPU the cache takes its share of what they leave.
        budget_bytes = share.cache_budget_bytes(self.device)
        self.backend = open_backend(replace(spec, budget_bytes=budget_bytes, prepare=acceleration.prepare_cache))
        self.states = self._open_states(config)
        self.model = Decoder.build(
            self.model_config, weights, rotary, self.backend, share,
            local_rotary=local_rotary, states=self.states, product=acceleration.linears(weights, self.backend),
            quantised=acceleration.quantised_linears(self.backend),
        )  # fmt: skip
        self._decoder = acceleration.decoder(self.model, self.backend)
        self.adapters = {
            name: read_adapter(name, folder, self.model_config, self.dtype, self.device)
            for name, folder in (adapters or {}).items()
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors and those of its adapters by their paths: `layers.3.mlp.down_proj.weight`."""
        found = dict(_tensors("", self.model))
        for adapter in self.adapters.values():
            for update in (item for updates in adapter.updates.values() for item in updates):
                found |= {f"{update.name}.lora_A": update.a_RI, f"{update.name}.lora_B": update.b_OR}
        return found

    def close(self) -> None:
        """Give the device's memory back; nothing else may be called afterwards."""
        if self.backend.cache is not None:
            self.backend.cache.close()
        if self.states is not None:
            self.states.close()
        del self.model, self._decoder, self.acceleration  # which may hold the memory of recorded steps
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # or the device's free memory, by which caches are sized, does not count it

    @torch.no_grad()
    def run(self, chunks: Seq[ScheduledChunk], observer: Observer | None) -> Sampled:
        """Compute the chunks and choose the next token of each that has caught up."""
        computed = chunks if self.backend.cache is not None else [replace(chunk, start=0) for chunk in chunks]
        watching = observer if self.shows_operations else None
        self._share.tell_step(computed, watching is not None)
        batch = self.batch(computed, watching and self._share.watching(watching))
        if observer is not None:
            observer.begin_step(describe(chunks, computed, self.backend))
        logits_RV = self.forward(batch)
        if observer is not None and watching is None and logits_RV is not None:
            observer.tap("lm_head", logits_RV)
        sequences = [view for chunk in chunks if chunk.samples for view in chunk.sequence.sampling_views()]
        sampled = Sampled([], []) if logits_RV is None else sample(logits_RV, sequences)
        if observer is not None:
            observer.end_step(sampled.token_ids)
        return sampled

    @torch.no_grad()
    def read_back(self, sequence: Sequence, observer: Observer | None) -> None:
        """Show an observer what the cache holds of a request."""
        if observer is not None and self.backend.cache is not None and sequence.num_computed_tokens:
            self._share.tell_read_back(sequence)
            self.show_cache(sequence, self._share.watching(observer))

    def keep_states(self, chunks: Seq[ScheduledChunk], observer: Observer | None) -> None:
        """Let the states after accepted guesses be those of their blocks, and show an observer all states."""
        if self.states is not None:
            self.states.accept([slot for chunk in chunks for slot in slots_of(chunk, self.states.block_size)])
            if observer is not None:
                show_states(chunks, self.states, tuple(self.model_config.delta_nets), observer)

    def copy_block(self, source: int, target: int) -> None:
        """Copy what is kept of one block to another."""
        if self.backend.cache is not None:
            self._share.tell_copy(source, target)
            self.backend.cache.copy_block(source, target)
        if self.states is not None:
            self.states.copy(source, target)

    def batch(self, computed: Seq[ScheduledChunk], observer: Observer | None) -> Batch:
        """Return a step's batch; an observed one with its plan, so that no observer takes planning for an operation."""
        batch = build_batch(computed, self.backend.block_size, self.device, observer, self.adapters)
        if self.states is not None:
            batch = replace(batch, pieces=self.states.plan(computed))
        return batch if observer is None else self._planned(batch)

    def forward(self, batch: Batch) -> torch.Tensor | None:
        """Return the logits [R, V] of this process, valid until the next step; None when no row is sampled."""
        return self.acceleration.run(self._compute, batch)

    def show_cache(self, sequence: Sequence, observer: Observer) -> None:
        """Show what the cache of this process holds of a request."""
        layers, has_latents = self.model_config.attention_layers, self.model_config.latent is not None
        show_cache(sequence, self.backend, layers, observer, has_latents=has_latents)

    def _compute(self, batch: Batch) -> torch.Tensor | None:
        if batch.observer is None:
            batch = self._planned(batch)
        with self._numerics():
            return self._decoder(batch)

    def _planned(self, batch: Batch) -> Batch:
        return replace(batch, plan=self.backend.plan(batch))

    def _open_rotary(self, config: ModelConfig) -> tuple[RotaryEmbedding, RotaryEmbedding | None]:
        """Return what rotates the layers, and what rotates those with a window if that is another."""
        rotary = RotaryEmbedding(config, self.device, self.dtype)
        if config.local_rope is None:
            return rotary, None
        return rotary, RotaryEmbedding(replace(config, rope=config.local_rope), self.device, self.dtype)

    def _cache_spec(self, config: EngineConfig, model_dir: str | Path) -> CacheSpec:
        layers, latent = self.model_config.attention_layers, self.model_config.latent
        return CacheSpec(
            num_layers=len(layers),
            num_kv_heads=self.model_config.num_key_value_heads if latent is None else 1,
            head_dim=self.model_config.head_dim if latent is None else latent.cached_dim,
            value_dim=None if latent is None else latent.rank,
            score_scale=None if latent is None else self.model_config.score_scale,
            dtype=self.dtype,
            device=self.device,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            layer_windows=tuple(self.model_config.layer_windows[layer] for layer in layers),
            state_bytes=0 if self._state_spec is None else self._state_spec.num_bytes,
            stored_dtype=None if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype),
            scales=_cache_scales(config, model_dir, layers, latent is not None),
        )

    def _open_states(self, config: EngineConfig) -> StateCache | None:
        if self._state_spec is None:
            return None
        num_guesses = config.max_num_seqs * config.num_speculative_tokens
        return StateCache(self._state_spec, self.backend.num_blocks, self.backend.block_size, num_guesses)


def find_acceleration() -> type[Acceleration]:
    """Return that of the room `fast` where it is there, else the plain one."""
    try:
        from reference_engine.fast.acceleration import FastAcceleration
    except ModuleNotFoundError as error:
        if error.name != "reference_engine.fast":
            raise
        return Acceleration
    return FastAcceleration


def _cache_scales(
    config: EngineConfig, model_dir: str | Path, layers: Seq[int], has_latents: bool
) -> tuple[tuple[float, float], ...]:
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


def _check_adapters(adapters: Mapping[str, object], ranks: Share | None, model_config: ModelConfig) -> None:
    """Refuse what would leave an adapter's part out."""
    others = {
        "several ranks": ranks is not None,
        "recurrent layers": bool(model_config.delta_nets),
        "latent attention": model_config.latent is not None,
    }
    for name in (name for name, is_there in others.items() if adapters and is_there):
        raise ConfigError("adapters are not served with this", where="EngineConfig", expected="off", actual=name)


def _check_compiled(config: EngineConfig, model_config: ModelConfig) -> None:
    if config.compile_layers and model_config.delta_nets:
        raise ConfigError(
            "recurrent layers are not compiled", where="EngineConfig.compile_layers", expected=False, actual=True
        )


def _tensors(name: str, part: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a tree of layers by their paths."""
    if isinstance(part, torch.Tensor):
        if part.dim():  # or it is a number of the config
            yield name, part
    elif isinstance(part, tuple):
        for index, child in enumerate(part):
            yield from _tensors(f"{name}.{index}", child)
    elif is_dataclass(part):
        for field in fields(part):
            own = re.sub("_[A-Z]+$", "", field.name)  # weight_OI, whose shape is not part of its name
            yield from _tensors(f"{name}.{own}" if name else own, getattr(part, field.name))


def _state_spec(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> StateSpec | None:
    shapes = list(config.delta_nets.values())
    return StateSpec(num_layers=len(shapes), shape=shapes[0], dtype=dtype, device=device) if shapes else None


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
    limit = model_config.rope.max_positions(model_config.max_position_embeddings)
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            "max_model_len is more than the model allows", where="EngineConfig.max_model_len",
            expected=f"at most {limit}, by max_position_embeddings and the rotary scaling", actual=config.max_model_len,
        )  # fmt: skip
    return config.max_model_len or limit
