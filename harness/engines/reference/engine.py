"""The adapter of the reference engine."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from harness.base.numerics import Numerics
from harness.engines.adapter import LIMITS, Capabilities, Control, Engine, Workload
from harness.engines.reference.errors import parse_reference_options, reference_errors
from harness.engines.reference.run import ForcedDrafts, ReferenceMemory, ReferenceRecorder, run_workload
from harness.engines.reference.session import ReferenceSession
from harness.errors import Code, HarnessError
from harness.formats.checkpoint.quantised import cache_scales, served_folder
from harness.formats.recording import RecordingWriter
from harness.results.settings import ModelSettings, distinct
from reference_engine import EngineConfig, LLMEngine
from reference_engine.checkpoint.experts import ExpertsShape
from reference_engine.checkpoint.load import read_cache_scales
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.errors import EngineError
from reference_engine.parallel.worker import parallel_engine
from reference_engine.rotary import RotaryEmbedding

_WITHOUT_CACHE = ("plain", "chunked", "batched", "mixed", "tensor-parallel")
_WITH_CACHE = (*_WITHOUT_CACHE, "forked", "rewound", "speculative")
_SCHEDULES = {"contiguous": _WITH_CACHE, "recompute": _WITHOUT_CACHE}
"""Schedules that a backend without blocks, or without a cache, can follow."""
_ALL_SCHEDULES = (*_WITH_CACHE, "prefix-hit", "preempted")
_LIMITS_WITHOUT_BLOCKS = ("max_num_batched_tokens", "max_num_seqs")
_EXPANDED = ("self_attn.kv_b_proj", "self_attn.key", "self_attn.value")
"""Taps that the engine never computes in latent attention: it uses the latent as key and value."""
_SMALL_BLOCK = 4
"""Tokens of a block under `preempted`: small blocks run out sooner."""


def open_engine(folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> Engine:
    """Open the reference engine.

    Options are the fields of its `EngineConfig`, `lora`, an adapter's folder, and of a quantised checkpoint `weights`:
    `dequantised`, by the harness's own reader, or `checkpoint`, for the engine's own products with quantised weights.
    """
    config = {name: value for name, value in options.items() if name not in ("lora", "weights")}
    adapters = {"lora": options["lora"]} if "lora" in options else {}
    weights = options.get("weights", "dequantised")
    if weights not in ("dequantised", "checkpoint"):
        what, expected = f"unknown weights {weights!r}", "dequantised or checkpoint"
        raise HarnessError(Code.BAD_OPTION, what, where="--engine-option weights", expected=expected, actual=weights)
    if weights == "checkpoint":
        folder = served_folder(folder)
    return ReferenceEngine(
        folder=folder, dtype=dtype, device=device, options=parse_reference_options(config), adapters=adapters
    )


class ReferenceEngine:
    """Adapter of `reference_engine.LLMEngine`."""

    name = "reference"

    def __init__(
        self,
        *,
        folder: Path,
        dtype: str,
        device: str,
        options: Mapping[str, str | int],
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self._adapters = adapters or {}
        self._folder, self._options = folder, dict[str, Any]({**options, "dtype": dtype, "device": device})
        backend = str(options.get("attention_backend", "paged"))
        schedules = _SCHEDULES.get(backend, _ALL_SCHEDULES)
        if self._adapters:  # tensor-parallel ranks do not support adapters
            schedules = tuple(name for name in schedules if name != "tensor-parallel")
        limits = LIMITS if backend not in _SCHEDULES else _LIMITS_WITHOUT_BLOCKS
        free = tuple(name for name in limits if name not in self._options)  # not set by an option
        self._declare_cache(str(options.get("kv_cache_dtype", "auto")))
        follows_length = keeps_states = self._keeps_latents = False
        with suppress(EngineError):  # a run raises it
            config = ModelConfig.from_folder(folder)
            follows_length, keeps_states = config.rope.rope_len(1) is not None, bool(config.delta_nets)
            self._keeps_latents = config.latent is not None
        if keeps_states or self._keeps_latents:
            schedules = tuple(name for name in schedules if name != "tensor-parallel")
        self.capabilities = Capabilities(
            schedules=schedules,
            keeps_cache=backend != "recompute",
            keeps_states=keeps_states,
            unsupported_taps=_EXPANDED if self._keeps_latents else (),
            numerics=self._numerics(rotates_by_request=follows_length),
            not_served=None,
            control=Control(limits=free, aborts=True, forks=backend != "recompute"),
        )

    def _declare_cache(self, dtype: str) -> None:
        """Set the checkpoint's scales of a quantised cache as an option: the engine's loader may not read them."""
        self._cache, self._cache_scales = (None if dtype == "auto" else dtype), dict[str, tuple[float, ...]]()
        if self._cache is None:
            return
        with reference_errors(self._folder):
            layers = ModelConfig.from_folder(self._folder).attention_layers
            pairs = read_cache_scales(self._folder, layers)
        taps = [tuple(f"model.layers.{layer}.{part}_cache" for part in "kv") for layer in layers]
        read = cache_scales(self._folder) or {
            tap: (scale,)
            for names, scales in zip(taps, pairs, strict=False)
            for tap, scale in zip(names, scales, strict=True)
        }
        if read and not all(len(read.get(tap, ())) == 1 for pair in taps for tap in pair):
            what = "the reference engine has one scale for K and one for V of each layer"
            hint = "the checkpoint has others, or lacks some"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where=str(self._folder), hint=hint)
        if read:
            self._cache_scales = read
            self._options["kv_cache_scales"] = tuple((read[k][0], read[v][0]) for k, v in taps)

    def _numerics(self, *, rotates_by_request: bool) -> Numerics | None:
        """Declare the dtype and scales of the cache; scales that are all 1 are omitted."""
        if self._cache is None and not rotates_by_request:
            return None
        scales = {} if set(self._cache_scales.values()) <= {(1.0,)} else self._cache_scales
        return Numerics(rotates_by_request=rotates_by_request, cache=self._cache, cache_scales=scales)

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Run the workload on a fresh engine; see `Engine.run`."""
        with reference_errors(self._folder), self._opened(workload) as engine:
            is_other = engine.runner.kernels.changes_when_observed
            engine.runner.shows_operations = not workload.is_served and (workload.taps == "all" or not is_other)
            memory = ReferenceMemory(engine) if workload.poison is not None else None
            run_workload(engine, workload, ReferenceRecorder(writer, ForcedDrafts(workload), workload.poison, memory))

    def resolved_settings(self) -> ModelSettings:
        """See `SettingsShower`: values that the engine reads from config.json, and its rotary frequencies."""
        with reference_errors(self._folder):
            return _settings(ModelConfig.from_folder(self._folder))

    def open_session(self, *, max_num_tokens: int, max_num_seqs: int) -> ReferenceSession:
        """See `Steppable.open_session`; explicit options take precedence."""
        unknown = "recurrent layers" if self.capabilities.keeps_states else "latent attention"
        if self.capabilities.keeps_states or self._keeps_latents:
            what = f"the profiler has no cost formulas for {unknown}"
            hint = "profile a model of another family; harness estimate sizes this one"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where=str(self._folder), hint=hint)
        limits = {"max_num_batched_tokens": max_num_tokens, "max_num_seqs": max_num_seqs}
        with reference_errors(self._folder):
            config = EngineConfig(**{**limits, **self._options})
            engine = LLMEngine(self._folder, config, adapters=self._adapters)
        return ReferenceSession(engine, self._folder)

    def _opened(self, workload: Workload) -> AbstractContextManager[LLMEngine]:
        config, num_ranks = self._config(workload), workload.schedule.num_ranks
        if num_ranks == 1:
            return LLMEngine(self._folder, config, adapters=self._adapters)
        return parallel_engine(self._folder, config, num_ranks)

    def _config(self, workload: Workload) -> EngineConfig:
        """Translate the schedule into limits of the engine; explicit options take precedence."""
        schedule, num_requests = workload.schedule, len(workload.requests)
        if workload.timeline is not None:
            return EngineConfig(**{**workload.timeline.limits, **self._options})
        options: dict[str, str | int] = {"max_num_seqs": 1}
        if schedule.is_batched:
            options["max_num_seqs"] = num_requests + len(workload.copies)
        if schedule.chunk_size is not None:
            options["max_num_batched_tokens"] = schedule.chunk_size
        if schedule.trigger == "prefix_hit":
            options["enable_prefix_caching"] = True
        if schedule.has_drafts:
            options["block_size"] = _SMALL_BLOCK
        if schedule.trigger == "preempted":
            options["block_size"] = int(self._options.get("block_size", _SMALL_BLOCK))
            options["num_blocks"] = 1 + workload.num_blocks(int(options["block_size"]))  # and the null block
        return EngineConfig(**{**options, **self._options})


def _settings(config: ModelConfig) -> ModelSettings:
    ropes = [config.rope, *([] if config.local_rope is None else [config.local_rope])]
    rotaries = [RotaryEmbedding(replace(config, rope=rope), torch.device("cpu"), torch.float32) for rope in ropes]
    experts = [mlp for mlp in config.mlps.values() if isinstance(mlp, ExpertsShape)]
    sliding = {layer: window for layer, window in enumerate(config.layer_windows) if window is not None}
    return ModelSettings(
        num_layers=(config.num_hidden_layers,),
        hidden_size=(config.hidden_size,),
        num_heads=(config.num_attention_heads,),
        num_kv_heads=(config.num_key_value_heads,),
        head_dim=(config.head_dim,),
        norm_eps=(config.rms_norm_eps,),
        rope_theta=distinct(float(rope.theta) for rope in ropes),
        rope_frequencies=distinct(tuple(rotary.inv_freq.tolist()) for rotary in rotaries),
        softmax_scale=(config.score_scale,),
        attention_cap=(None,),
        logit_cap=(None,),
        sliding_window=distinct(sliding.values()),
        sliding_layers=(tuple(sliding),),
        tied_head=(config.tie_word_embeddings,),
        num_experts=distinct(expert.num_experts for expert in experts),
        num_chosen_experts=distinct(expert.num_chosen for expert in experts),
    )
