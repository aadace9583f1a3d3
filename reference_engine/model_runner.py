"""The model on its device: weights, KV cache and attention, and the forward of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from reference_engine.attention.backend import BACKENDS, find_backend
from reference_engine.batch import Batch, build_batch
from reference_engine.checkpoint.load import load_weights
from reference_engine.checkpoint.model_config import DTYPES, EngineConfig, ModelConfig
from reference_engine.checkpoint.weights import TOKEN_EMBEDDING
from reference_engine.device import open_device
from reference_engine.errors import ConfigError
from reference_engine.fast.fused import FusedDecoder
from reference_engine.fast.graphs import Capture, CudaCapture, DecodeGraphs
from reference_engine.fast.packing import can_widen, max_few_rows
from reference_engine.kv_cache import CacheSpec, cache_budget_bytes
from reference_engine.layers import FewRows
from reference_engine.lora import read_adapter
from reference_engine.model import Decoder
from reference_engine.numerics import step_numerics
from reference_engine.observing.observer import Observer
from reference_engine.observing.steps import describe, show_cache
from reference_engine.parallel.messages import Command, encode_chunks
from reference_engine.parallel.ranks import Ranks, ShardedTaps, shard_config
from reference_engine.rotary import RotaryEmbedding
from reference_engine.sampler import Sampled, sample
from reference_engine.sequence import Chunk, Sequence

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
        ranks: Ranks | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        _check_adapters(config, adapters or {}, ranks)
        self._ranks = ranks
        self.model_config = model_config if ranks is None else shard_config(model_config, ranks.size)
        self.device = open_device(config.device if ranks is None else str(ranks.device))
        self._numerics = step_numerics if self.device.type == "cuda" else nullcontext
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
        rotary, local_rotary = self._open_rotary(model_config)
        weights = load_weights(model_dir, model_config, self.dtype, self.device, ranks)
        # After the weights, so that on a GPU the cache takes its share of what they leave.
        self.backend = open_backend(replace(spec, budget_bytes=self._cache_budget_bytes()))
        few_rows = self._few_rows(config)
        widens_weights = self._widens_weights(config, weights, has_few_rows=few_rows is not None)
        if few_rows is not None and few_rows.max_rows == 1 and not widens_weights:
            few_rows = None  # packed weights serve one row, and plain ones several, less well
        self.model = Decoder.build(
            self.model_config, weights, rotary, self.backend, ranks,
            local_rotary=local_rotary, packs_weights=not config.compile_layers, widens_weights=widens_weights,
            few_rows=few_rows,
        )  # fmt: skip
        is_fusable = model_config.family.is_fusable and self.backend.operators is not None and not config.compile_layers
        self.adapters = {
            name: read_adapter(name, folder, self.model_config, self.dtype, self.device)
            for name, folder in (adapters or {}).items()
        }
        self.is_fused = config.fused_kernels and is_fusable
        self._observed = self._fused() if self.is_fused else self.model
        self._unobserved = self.model.compiled() if config.compile_layers else self._observed
        self._graphs = self._open_graphs(config)

    @property
    def replays_graphs(self) -> bool:
        """Whether decode steps without an observer are recorded and replayed."""
        return self._graphs is not None

    def close(self) -> None:
        """Give the device's memory back; nothing else may be called afterwards."""
        if self.backend.cache is not None:
            self.backend.cache.close()
        # Recorded steps refer to this runner, which refers to them: only the garbage collector would part them.
        del self.model, self._observed, self._unobserved, self._graphs
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # or the device's free memory, by which caches are sized, does not count it

    @torch.no_grad()
    def run(self, chunks: Seq[Chunk], observer: Observer | None) -> Sampled:
        """Compute the chunks and choose the next token of each that has caught up."""
        computed = chunks if self.backend.cache is not None else [replace(chunk, start=0) for chunk in chunks]
        if self._ranks is not None:
            self._ranks.broadcast([Command.STEP, observer is not None, *encode_chunks(computed)])
            observer = observer and ShardedTaps(self._ranks, observer)
        batch = self._build_batch(computed, observer)
        if observer is not None:
            observer.begin_step(describe(chunks, computed, self.backend))
        logits_RV = self._forward(batch)
        sequences = [chunk.sequence for chunk in chunks if chunk.samples]
        sampled = Sampled([], []) if logits_RV is None else sample(logits_RV, sequences)
        if observer is not None:
            observer.end_step(sampled.token_ids)
        return sampled

    @torch.no_grad()
    def read_back(self, sequence: Sequence, observer: Observer | None) -> None:
        """Show an observer what the cache holds of a request."""
        if observer is None or self.backend.cache is None or not sequence.num_computed_tokens:
            return
        if self._ranks is not None:
            whole = Chunk(sequence, 0, sequence.num_computed_tokens)
            self._ranks.broadcast([Command.READ_BACK, *encode_chunks([whole])])
            observer = ShardedTaps(self._ranks, observer)
        show_cache(sequence, self.backend, self.model_config.num_hidden_layers, observer)

    def copy_block(self, source: int, target: int) -> None:
        """Copy the K and V of one block to another."""
        if self._ranks is not None:
            self._ranks.broadcast([Command.COPY_BLOCK, source, target])
        self.follow_copy(source, target)

    @torch.no_grad()
    def follow(self, computed: Seq[Chunk], *, is_observed: bool) -> None:
        """Compute this rank's part of a step that rank 0 runs."""
        assert self._ranks is not None
        self._forward(self._build_batch(computed, ShardedTaps(self._ranks, None) if is_observed else None))

    def follow_copy(self, source: int, target: int) -> None:
        """Copy a block of this rank's cache alone."""
        if self.backend.cache is not None:
            self.backend.cache.copy_block(source, target)

    @torch.no_grad()
    def follow_read_back(self, sequence: Sequence) -> None:
        """Give this rank's part of what the cache holds of a request."""
        assert self._ranks is not None
        show_cache(sequence, self.backend, self.model_config.num_hidden_layers, ShardedTaps(self._ranks, None))

    def _build_batch(self, computed: Seq[Chunk], observer: Observer | None) -> Batch:
        """Return a step's batch; an observed one with its plan, so that no observer takes planning for an operation."""
        batch = build_batch(computed, self.backend.block_size, self.device, observer, self.adapters)
        return batch if observer is None else self._planned(batch)

    def _planned(self, batch: Batch) -> Batch:
        return replace(batch, plan=self.backend.plan(batch))

    def _forward(self, batch: Batch) -> torch.Tensor | None:
        if batch.observer is not None:
            return self._compute(batch)
        logits_RV = None if self._graphs is None else self._graphs.run(batch)
        return self._compute(self._planned(batch)) if logits_RV is None else logits_RV

    def _compute(self, batch: Batch) -> torch.Tensor | None:
        model = self._unobserved if batch.observer is None else self._observed
        with self._numerics():
            return model(batch)

    def _fused(self) -> Callable[[Batch], torch.Tensor | None]:
        return FusedDecoder.of(self.model, self.backend.operators)

    def _open_rotary(self, config: ModelConfig) -> tuple[RotaryEmbedding, RotaryEmbedding | None]:
        """Return what rotates the layers, and what rotates those with a window if that is another."""
        rotary = RotaryEmbedding(config, self.device, self.dtype)
        if config.local_rope is None:
            return rotary, None
        return rotary, RotaryEmbedding(replace(config, rope=config.local_rope), self.device, self.dtype)

    def _open_graphs(self, config: EngineConfig) -> DecodeGraphs | None:
        is_wanted = config.cuda_graphs and self.device.type == "cuda" and self._ranks is None and not self.adapters
        if not is_wanted or not self.backend.is_capturable or not self.model_config.family.is_capturable:
            return None
        return self.record_decode(config, CudaCapture(self.device))

    def record_decode(self, config: EngineConfig, capture: Capture) -> DecodeGraphs:
        """Return what records decode steps with `capture` and replays them."""

        def forward(batch: Batch) -> torch.Tensor:
            logits_RV = self._compute(self._planned(batch))
            assert logits_RV is not None, "every row of a decode step is sampled"
            return logits_RV

        return DecodeGraphs(
            forward,
            max_num_seqs=config.max_num_seqs,
            max_blocks=-(-self.max_model_len // self.backend.block_size),
            device=self.device,
            capture=capture,
        )

    def _few_rows(self, config: EngineConfig) -> FewRows | None:
        """Return the backend's own product of few rows; None if it has none."""
        linear = getattr(self.backend.operators, "linear", None)
        if config.compile_layers or linear is None:
            return None
        return FewRows(linear, max_few_rows(self.dtype))

    def _widens_weights(self, config: EngineConfig, weights: Mapping[str, torch.Tensor], *, has_few_rows: bool) -> bool:
        if config.widen_weights is not None:
            return config.widen_weights
        products = [weight for name, weight in weights.items() if name != TOKEN_EMBEDDING]
        num_engines = 1 if self._ranks is None else self._ranks.size
        return can_widen(products, num_engines=num_engines, has_few_rows=has_few_rows)

    def _cache_budget_bytes(self) -> int:
        if self._ranks is None:
            return cache_budget_bytes(self.device)
        # Rank 0 hands out the blocks of all ranks: none may have fewer.
        return self._ranks.least(cache_budget_bytes(self.device, num_engines=self._ranks.num_on_device))

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


def _check_adapters(config: EngineConfig, adapters: Mapping[str, object], ranks: Ranks | None) -> None:
    """Refuse what would leave an adapter's part out."""
    others = {
        "compile_layers": config.compile_layers,
        f"fused_kernels with the backend {config.attention_backend}": config.fused_kernels
        and config.attention_backend in ("cpp", "triton"),
        "several ranks": ranks is not None,
    }
    for name in (name for name, is_on in others.items() if is_on and adapters):
        raise ConfigError("adapters are not served with this", where="EngineConfig", expected="off", actual=name)


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
