"""vLLM's engine, opened for a block and given requests: what checks, profiles and benchmarks share."""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.engine.llm_engine import LLMEngine

from harness.engines.adapter import engine_refusals
from harness.extensions.vllm.ranks import watched_workers


@contextmanager
def opened_engine(arguments: Mapping[str, Any], *, is_in_process: bool = True) -> Iterator[Any]:
    """Open an `LLMEngine` for the block, with its engine core in this process or in one of its own.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE, with what vLLM says.
    """
    if arguments.get("tensor_parallel_size", 1) > 1:
        # On a CPU vLLM binds each rank to a NUMA node of its own, and refuses if there are fewer nodes than ranks.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    engine = None
    try:
        with engine_refusals("vLLM", arguments["model"]):
            engine = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=not is_in_process)
        with watched_workers(engine):
            yield engine
    finally:
        if engine is not None:
            engine.engine_core.shutdown()
            del engine
        gc.collect()
        cleanup_dist_env_and_memory()


def model_runner(engine: Any) -> Any:
    """Return the model runner of an engine whose core is in this process."""
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def add_request(engine: Any, key: int, prompt: Sequence[int], num_new: int) -> None:
    """Add a request that is continued greedily, and past every end-of-sequence token."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    engine.add_request(str(key), {"prompt_token_ids": list(prompt)}, params)
