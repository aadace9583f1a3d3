"""vLLM under test: its own scheduler, model runner, kernels and cache, in this process."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import vllm
from pydantic import ValidationError
from vllm import EngineArgs, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.engine.llm_engine import LLMEngine

from harness.engines.adapter import Offer, Workload
from harness.engines.vllm.options import base_arguments
from harness.engines.vllm.ranks import EXTENSION, recorded_ranks
from harness.engines.vllm.session import VllmSession
from harness.engines.vllm.steps import StepWatcher
from harness.errors import Code, HarnessError
from harness.recording import RecordingWriter, RequestInfo
from harness.taps import Graph

SCHEDULES = ("plain", "chunked", "batched", "mixed", "prefix-hit", "preempted", "tensor-parallel")
_PROBE_TOKENS = 64
"""Longest request of the engine that is opened to see whether vLLM takes the model."""


class VllmEngine:
    """Adapter of `vllm.v1.engine.llm_engine.LLMEngine`."""

    name = "vllm"
    environment: Mapping[str, str] = {"vllm": vllm.__version__}

    def __init__(self, *, folder: Path, dtype: str, options: Mapping[str, Any]) -> None:
        """Start vLLM once, and let it compute a token.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE, with what vLLM says.
        """
        self._folder, self._arguments = folder, {**base_arguments(folder, dtype), **options}
        self._options = options
        self._graph: Graph | None = None
        with self._opened({"max_model_len": _PROBE_TOKENS, "max_num_seqs": 1}) as engine, _refusing(folder):
            _add(engine, 0, [0] * (_PROBE_TOKENS // 2), 1)
            engine.step()  # some models are refused only here
            config = engine.vllm_config
            self._block_size = int(config.cache_config.block_size)
            self._num_groups = len(_runner(engine).kv_cache_config.kv_cache_groups)
            is_quantized = config.cache_config.cache_dtype not in ("auto", dtype)
        self.offer = Offer(schedules=SCHEDULES, keeps_cache=not is_quantized)

    def match_taps(self, graph: Graph) -> None:
        """See `TapMatcher`; which of them vLLM's modules show is found at each run, in the loaded model."""
        self._graph = graph

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Run the workload on a fresh engine; see `Engine.run`."""
        if self._graph is None:
            raise HarnessError(Code.ENGINE_FAILED, "the engine was not told the model's graph", where=self.name)
        requests = [*workload.requests, *workload.copies]
        groups = [requests] if workload.schedule.is_batched else [[request] for request in requests]
        with (
            self._opened(self._limits(workload)) as engine,
            self._recorded(engine, workload, requests, writer) as lacking,
        ):
            self.offer = replace(self.offer, lacking=lacking)
            for group in groups:
                _drive(engine, group)

    @contextmanager
    def _recorded(
        self, engine: Any, workload: Workload, requests: Sequence[RequestInfo], writer: RecordingWriter
    ) -> Iterator[tuple[str, ...]]:
        """Record what the block does; yield what vLLM's modules do not show."""
        assert self._graph is not None
        if workload.schedule.num_ranks > 1:
            with recorded_ranks(engine, self._graph, requests, writer) as lacking:
                yield lacking
            return
        reads_back = self.offer.keeps_cache
        with StepWatcher(_runner(engine), self._graph, requests, writer, reads_back=reads_back) as watcher:
            yield watcher.lacking

    def open_session(self, *, max_num_tokens: int, max_num_seqs: int) -> VllmSession:
        """See `Steppable.open_session`; explicit options win. No request finds another's tokens in the cache."""
        limits = {"max_num_batched_tokens": max_num_tokens, "max_num_seqs": max_num_seqs}
        return VllmSession(self._opened({**limits, "enable_prefix_caching": False}), _runner)

    @contextmanager
    def _opened(self, limits: Mapping[str, Any]) -> Iterator[Any]:
        """Open an engine for the block; explicit options win over limits."""
        arguments = {**self._arguments, **limits, **self._options}
        engine = None
        try:
            with _refusing(self._folder):
                engine = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=False)
            yield engine
        finally:
            if engine is not None:
                engine.engine_core.shutdown()
                del engine
            gc.collect()
            cleanup_dist_env_and_memory()

    def _limits(self, workload: Workload) -> dict[str, Any]:
        """Translate the schedule into vLLM's own limits."""
        schedule, requests = workload.schedule, [*workload.requests, *workload.copies]
        num_tokens = sum(len(request.token_ids) + 1 for request in requests)
        limits: dict[str, Any] = {
            "max_model_len": max(len(request.token_ids) + 1 for request in requests),
            "max_num_seqs": len(requests) if schedule.is_batched else 1,
            "max_num_batched_tokens": num_tokens,
            "enable_prefix_caching": schedule.trigger == "prefix_hit",
            "num_gpu_blocks_override": 1 + sum(self._num_blocks(len(request.token_ids) + 1) for request in requests),
        }
        if schedule.chunk_size is not None:  # a lone prompt may use all of the budget: the budget is the chunk
            name = "long_prefill_token_threshold" if schedule.is_batched else "max_num_batched_tokens"
            limits[name] = schedule.chunk_size
        if schedule.num_ranks > 1:
            limits |= {"tensor_parallel_size": schedule.num_ranks, "worker_extension_cls": EXTENSION}
            limits["distributed_executor_backend"] = "mp"
        if schedule.trigger == "preempted":  # the prompts fit, and the longest request, but not all that follows them
            prompts = sum(self._num_blocks(request.prompt_length) for request in requests)
            limits["num_gpu_blocks_override"] = 1 + max(prompts, self._num_blocks(limits["max_model_len"]))
        return limits

    def _num_blocks(self, num_tokens: int) -> int:
        """Return the blocks of a request: some in each group of layers (all of them; those with a window; ...)."""
        return self._num_groups * -(-num_tokens // self._block_size)


def _runner(engine: Any) -> Any:
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Say of what vLLM refuses that the engine cannot serve it."""
    try:
        yield
    except Exception as error:  # ValueError, pydantic's, RuntimeError, OSError, ...: vLLM has no error of its own
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error) or type(error).__name__
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"vLLM cannot run the model: {' '.join(said.split()[:60])}",
            where=folder,
            hint="give vLLM what it asks for as --engine-option NAME=VALUE, or another model",
        ) from error


def _drive(engine: Any, requests: Sequence[RequestInfo]) -> None:
    """Run requests to their end."""
    for request in requests:
        prompt, num_new = request.token_ids[: request.prompt_length], len(request.token_ids) - request.prompt_length + 1
        _add(engine, request.id, prompt, num_new)
    while engine.has_unfinished_requests():
        engine.step()


def _add(engine: Any, key: int, prompt: Sequence[int], num_new: int) -> None:
    """Add a request that is continued greedily, and past every end-of-sequence token."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    engine.add_request(str(key), {"prompt_token_ids": list(prompt)}, params)
