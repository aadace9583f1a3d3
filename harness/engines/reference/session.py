"""The reference engine step by step, watched through its own observer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import torch

from harness.engines.reference.errors import reference_errors
from harness.engines.stepping import COMMIT, PREPARE, SAMPLE, ExpertsLoad, ModelShape, OperationWatcher
from harness.results.profile import StepShape
from reference_engine import LLMEngine, SamplingParams, StepInfo
from reference_engine.checkpoint.experts import ExpertsShape

_COMPUTED_WITH_ANOTHER = (
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.k_norm",
    "k_rope",
    "mlp.up_proj",
    "mlp.gate.1",
)
"""Taps that are there as soon as the one before them is: q, k and v are one product, and so are gate and up; q and k
are normed, and rotated, before either is shown; a router shows which experts it chose and their weights together."""
_FUSED_WITH_ANOTHER = (".input_layernorm", ".post_attention_layernorm", "model.norm", "q_rope")
"""The same where kernels are fused: a residual is normed with its sum, and heads are rotated with their norm."""
_REPLAYS_GRAPHS = (
    "decode steps without an observer are replayed as CUDA graphs: latencies and wall times are those of graphs, "
    "tables, traces, memory and counts those of the same steps launched one kernel at a time"
)
_ADAPTED = (
    "times, counts and memory are with the adapter; formulas, and the roofline made of them, are of the base alone"
)


class ReferenceSession:
    """A loaded `LLMEngine`; see `Session`."""

    phases = ("prefill", "decode", "mixed")

    def __init__(self, engine: LLMEngine, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self._requests: set[int] = set()
        self.model = _model_shape(engine)
        self._adapter = next(iter(engine.runner.adapters), None)
        notes = {_REPLAYS_GRAPHS: engine.runner.kernels.replays_graphs, _ADAPTED: self._adapter is not None}
        self.notes = tuple(note for note, holds in notes.items() if holds)

    def add(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """See `TokenSession.add`."""
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, adapter=self._adapter)
        with reference_errors(self._folder):
            request = self._engine.add_request(prompt, params)
        self._requests.add(request)
        return request

    def step(self) -> Mapping[int, int]:
        """See `TokenSession.step`."""
        outputs = self._engine.step()
        self._requests -= {output.request_id for output in outputs if output.finish_reason is not None}
        if isinstance(self._engine.observer, _Boundaries):
            self._engine.observer.end()
        return {output.request_id: output.token_id for output in outputs}

    @contextmanager
    def watching(self, watcher: OperationWatcher) -> Iterator[None]:
        """See `Session.watching`."""
        before, self._engine.observer = self._engine.observer, _Boundaries(watcher, self._computed_with_another())
        try:
            yield
        finally:
            self._engine.observer = before

    def _computed_with_another(self) -> tuple[str, ...]:
        if not self._engine.runner.kernels.is_fused:
            return _COMPUTED_WITH_ANOTHER
        fused = _FUSED_WITH_ANOTHER if self.model.has_qk_norm else _FUSED_WITH_ANOTHER[:-1]
        return (*_COMPUTED_WITH_ANOTHER, *fused)

    def stop(self) -> None:
        """See `TokenSession.stop`."""
        for request in sorted(self._requests):
            self._engine.abort(request)
        self._requests.clear()

    def close(self) -> None:
        """Give the engine's memory back."""
        self._engine.close()

    def weights(self) -> Mapping[str, torch.Tensor]:
        """See `Session.weights`."""
        return self._engine.weights()

    def cache_tensors(self) -> Sequence[torch.Tensor]:
        """See `Session.cache_tensors`."""
        cache = self._engine.runner.backend.cache
        return [] if cache is None else [cache.data]


class _Boundaries:
    """The engine's observer: a tap is where the operation ends that made it."""

    def __init__(self, watcher: OperationWatcher, computed_with_another: tuple[str, ...]) -> None:
        self._watcher = watcher
        self._computed_with_another = computed_with_another
        self._is_readback = False

    def begin_step(self, step: StepInfo) -> None:
        self._is_readback = step.phase == "readback"
        if not self._is_readback:
            self._watcher.begin_step(_step_shape(step))
            self._watcher.reached(PREPARE)

    def tap(self, name: str, tensor: torch.Tensor) -> None:
        if not (self._is_readback or name.endswith(self._computed_with_another)):
            self._watcher.reached(name)

    def end_step(self, sampled: Sequence[int]) -> None:
        if not self._is_readback:
            self._watcher.reached(SAMPLE)

    def end(self) -> None:
        self._watcher.reached(COMMIT)


def _step_shape(step: StepInfo) -> StepShape:
    """Rows of one request follow one another."""
    runs = [
        [position for _, position in run]
        for _, run in groupby(zip(step.request_ids, step.positions, strict=True), key=lambda row: row[0])
    ]
    return StepShape(
        phase=step.phase,
        query_lens=tuple(map(len, runs)),
        context_lens=tuple(run[-1] + 1 for run in runs),
        num_sampled=len(step.sampled_rows),
    )


def _model_shape(engine: LLMEngine) -> ModelShape:
    config = engine.model_config
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        has_qk_norm=config.qk_norm,
        itemsize=engine.runner.dtype.itemsize,
        kv_itemsize=None if engine.runner.backend.cache is None else engine.runner.backend.cache.data.element_size(),
        windows=config.layer_windows,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        mlp_bias=config.mlp_bias,
        has_norms_behind="post_feedforward_layernorm" in config.family.layer_norms,
        experts={layer: _experts(shape) for layer, shape in config.mlps.items() if isinstance(shape, ExpertsShape)},
    )


def _experts(shape: ExpertsShape) -> ExpertsLoad:
    return ExpertsLoad(
        num_experts=shape.num_experts, num_chosen=shape.num_chosen, intermediate_size=shape.intermediate_size
    )
