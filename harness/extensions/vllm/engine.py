"""vLLM under test: its own scheduler, model runner, kernels and cache."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import vllm

from harness.engines.adapter import Capabilities, Workload, engine_refusals
from harness.engines.module_settings import settings_of_modules
from harness.errors import Code, HarnessError
from harness.extensions.vllm.learned import LearnedTaps
from harness.extensions.vllm.opening import (
    SCHEDULES,
    add_request,
    base_arguments,
    model_runner,
    opened_engine,
    schedule_limits,
    settings,
)
from harness.extensions.vllm.session import VllmSession
from harness.extensions.vllm.steps import VllmWatcher, declared_numerics, keeps_readable_cache, recorded_workers
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import Graph
from harness.results.settings import ModelSettings

_PROBE_TOKENS = 31
"""Tokens of the request that is computed to see whether vLLM takes the model."""
_LEARNING = {"max_num_seqs": 96, "enable_prefix_caching": False}
"""Limits of the engine from whose small steps the taps are learned."""


class VllmEngine:
    """Adapter of `vllm.v1.engine.llm_engine.LLMEngine`."""

    name = "vllm"
    environment: Mapping[str, str] = {"vllm": vllm.__version__}

    def __init__(self, *, folder: Path, dtype: str, options: Mapping[str, Any], is_in_process: bool = True) -> None:
        """Start vLLM once, and let it compute a token.

        Args:
            folder: of the checkpoint.
            dtype: of weights and activations.
            options: fields of `EngineArgs`.
            is_in_process: False: vLLM's engine core gets a process of its own while it is recorded.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE, with what vLLM says.
        """
        self._arguments, self._options = base_arguments(folder, dtype, options), options
        self._folder, self._dtype, self._is_in_process = folder, dtype, is_in_process
        self._graph: Graph | None = None
        self._learned: LearnedTaps | None = None
        with self._opened({"max_num_seqs": 1}) as engine, engine_refusals("vLLM", folder):
            runner = model_runner(engine)
            vocab_size = runner.model_config.get_vocab_size()
            add_request(engine, 0, [at % vocab_size for at in range(1, _PROBE_TOKENS + 1)], 1)
            engine.step()  # some models are refused only here
            self._settings = settings_of_modules(dict(runner.get_model().named_modules()))
            self._block_size = int(runner.cache_config.block_size)
            self._num_groups = len(runner.kv_cache_config.kv_cache_groups)
            self.capabilities = Capabilities(
                schedules=SCHEDULES,
                not_served="vLLM shows its logits through hooks alone",
                keeps_cache=keeps_readable_cache(runner),
                numerics=declared_numerics(runner, folder),
                notes=(f"vLLM was opened with {settings({**self._arguments, **options})}",),
            )

    def resolved_settings(self) -> ModelSettings:
        """See `SettingsShower`: what vLLM's modules show."""
        return self._settings

    def match_taps(self, graph: Graph) -> None:
        """See `TapMatcher`: the taps are learned from small steps of a fresh engine's model runner."""
        self._graph = graph
        with self._opened(_LEARNING) as engine:
            self._learned = LearnedTaps.of(model_runner(engine), self._folder, graph, self._dtype)

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Run the workload on a fresh engine; see `Engine.run`."""
        if self._graph is None or self._learned is None:
            raise HarnessError(Code.ENGINE_FAILED, "the engine was not told the model's graph", where=self.name)
        limits = schedule_limits(workload, block_size=self._block_size, num_groups=self._num_groups)
        with (
            self._opened(limits, is_in_process=self._is_in_process) as engine,
            self._recorded(engine, self._graph, self._learned, workload, writer) as unsupported,
        ):
            self.capabilities = replace(self.capabilities, unsupported_taps=unsupported)
            for batch in workload.batches:
                _drive(engine, batch)

    @contextmanager
    def _recorded(
        self, engine: Any, graph: Graph, learned: LearnedTaps, workload: Workload, writer: RecordingWriter
    ) -> Iterator[tuple[str, ...]]:
        """Record what the block does, here or in vLLM's worker processes; yield what is not shown."""
        requests = workload.all_requests
        if not self._is_in_process or workload.schedule.num_ranks > 1:
            with recorded_workers(engine, graph, learned, requests, writer) as unsupported:
                yield unsupported
            return
        with VllmWatcher(model_runner(engine), graph, learned, requests, writer) as watcher:
            yield watcher.unsupported_taps()

    def open_session(self, *, max_num_tokens: int, max_num_seqs: int) -> VllmSession:
        """See `Steppable.open_session`; explicit options win. No request finds another's tokens in the cache."""
        limits = {"max_num_batched_tokens": max_num_tokens, "max_num_seqs": max_num_seqs}
        return VllmSession(self._opened({**limits, "enable_prefix_caching": False}))

    def _opened(self, limits: Mapping[str, Any], *, is_in_process: bool = True) -> AbstractContextManager[Any]:
        """Open an engine for a block; explicit options win over limits."""
        return opened_engine({**self._arguments, **limits, **self._options}, is_in_process=is_in_process)


def _drive(engine: Any, requests: Sequence[RequestInfo]) -> None:
    """Run requests to their end."""
    for request in requests:
        prompt, num_new = request.token_ids[: request.prompt_length], len(request.token_ids) - request.prompt_length + 1
        add_request(engine, request.id, prompt, num_new)
    while engine.has_unfinished_requests():
        engine.step()
