"""One step on the device: from chunks to a batch, to logits, to tokens. `loader` puts the model there."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from reference_engine.batch import Batch, build_batch, slots_of
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.config import EngineConfig
from reference_engine.hooks.steps import describe, show_cache, show_states
from reference_engine.hooks.weights import named_tensors
from reference_engine.loader import load_model
from reference_engine.numerics import step_numerics
from reference_engine.observer import Observer
from reference_engine.requests.sequence import ScheduledChunk, Sequence
from reference_engine.sampler import Sampled, choose, sample
from reference_engine.speculation import sampling_views
from reference_engine.tensor_parallel import TensorParallel

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
        ranks: TensorParallel | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        self.shows_operations = True
        """Whether an observer sees every intermediate. If not, it sees the logits, and steps run as without it."""
        self._parallel = parallel = TensorParallel() if ranks is None else ranks
        config.check_model(model_config, has_adapters=bool(adapters), has_ranks=ranks is not None)
        loaded = load_model(model_dir, config, model_config, parallel, adapters or {})
        self.model_config, self.device, self.dtype = loaded.model_config, loaded.device, loaded.dtype
        self.max_model_len = config.resolve_max_model_len(model_config)
        self.backend, self.states, self.kernels = loaded.backend, loaded.states, loaded.kernels
        self.model, self.adapters = loaded.decoder, loaded.adapters
        self._decoder = self.kernels.decoder(self.model, self.backend)
        has_cache = self.backend.cache is not None and self.states is None
        self.can_run_ahead = config.async_scheduling and has_cache and ranks is None
        """Whether steps can be launched with tokens that only the device has (`in_flight`)."""
        self._numerics = step_numerics if self.device.type == "cuda" else nullcontext

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors and those of its adapters by their paths: `layers.3.mlp.down_proj.weight`."""
        tensors = dict(named_tensors("", self.model))
        for adapter in self.adapters.values():
            tensors |= adapter.tensors()
        return tensors

    def close(self) -> None:
        """Give the device's memory back; nothing else may be called afterwards."""
        if self.backend.cache is not None:
            self.backend.cache.close()
        if self.states is not None:
            self.states.close()
        del self.model, self._decoder, self.kernels  # which may hold the memory of recorded steps
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # or the device's free memory, by which caches are sized, does not count it

    @torch.no_grad()
    def run(self, chunks: Seq[ScheduledChunk], observer: Observer | None) -> Sampled:
        """Compute the chunks and choose the next token of each that has caught up."""
        computed = chunks if self.backend.cache is not None else [replace(chunk, start=0) for chunk in chunks]
        watching = observer if self.shows_operations else None
        self._parallel.tell_step(computed, watching is not None)
        batch = self.batch(computed, watching and self._parallel.watching(watching))
        if observer is not None:
            observer.begin_step(describe(chunks, computed, self.backend))
        logits_RV = self.forward(batch)
        if observer is not None and watching is None and logits_RV is not None:
            observer.tap("lm_head", logits_RV)
        sequences = [view for chunk in chunks if chunk.samples for view in sampling_views(chunk.sequence)]
        sampled = Sampled([], []) if logits_RV is None else sample(logits_RV, sequences)
        if observer is not None:
            observer.end_step(sampled.token_ids)
        return sampled

    @torch.no_grad()
    def launch(self, chunks: Seq[ScheduledChunk], before_R: torch.Tensor | None = None) -> torch.Tensor:
        """Compute chunks that have caught up without drafts, and return their tokens, [R] int64 on the device.

        With `before_R`, int64, each chunk is one token, which holds the row of `before_R` that its token is in.
        """
        batch = self.batch(chunks, None)
        if before_R is not None:
            batch.token_ids_T.copy_(before_R.index_select(0, batch.token_ids_T))
        logits_RV = self.forward(batch)
        assert logits_RV is not None, "every chunk is sampled"
        return choose(logits_RV, [chunk.sequence for chunk in chunks])

    @torch.no_grad()
    def read_back(self, sequence: Sequence, observer: Observer | None) -> None:
        """Show an observer what the cache holds of a request."""
        if observer is not None and self.backend.cache is not None and sequence.num_computed_tokens:
            self._parallel.tell_read_back(sequence)
            self.show_cache(sequence, self._parallel.watching(observer))

    def keep_states(self, chunks: Seq[ScheduledChunk], observer: Observer | None) -> None:
        """Let the states after accepted drafts be those of their blocks, and show an observer all states."""
        if self.states is not None:
            self.states.accept([slot for chunk in chunks for slot in slots_of(chunk, self.states.block_size)])
            if observer is not None:
                show_states(chunks, self.states, tuple(self.model_config.delta_nets), observer)

    def copy_block(self, source: int, target: int) -> None:
        """Copy what is kept of one block to another."""
        if self.backend.cache is not None:
            self._parallel.tell_copy(source, target)
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
        return self.kernels.run(self._compute, batch)

    def show_cache(self, sequence: Sequence, observer: Observer) -> None:
        """Show what the cache of this process holds of a request."""
        layers, has_latents = self.model_config.attention_layers, self.model_config.latent is not None
        show_cache(sequence, self.backend, layers, observer, has_latents=has_latents)

    def _compute(self, batch: Batch) -> torch.Tensor | None:
        if batch.plan is None:  # else it is an observed one, or what a recording reads
            batch = self._planned(batch)
        with self._numerics():
            return self._decoder(batch)

    def _planned(self, batch: Batch) -> Batch:
        return replace(batch, plan=self.backend.plan(batch))
