"""vLLM's engine, opened for a block and given requests: what checks, profiles and benchmarks share."""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any

from pydantic import ValidationError
from vllm import EngineArgs, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

from harness.errors import Code, HarnessError


@contextmanager
def opened_engine(arguments: Mapping[str, Any], *, is_in_process: bool = True) -> Iterator[Any]:
    """Open an `LLMEngine` for the block, with its engine core in this process or in one of its own.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE, with what vLLM says.
    """
    if arguments.get("tensor_parallel_size", 1) > 1:
        # On a CPU vLLM binds each rank to a NUMA node of its own, and refuses where there are fewer nodes than ranks.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    engine = None
    try:
        with refusing(arguments["model"]):
            engine = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=not is_in_process)
        if not is_in_process:
            _raise_where_it_dies(engine.engine_core)
        yield engine
    finally:
        if engine is not None:
            engine.engine_core.shutdown()
            del engine
        gc.collect()
        cleanup_dist_env_and_memory()


def _raise_where_it_dies(client: Any) -> None:
    """Let a client raise when its engine core ends: vLLM's own waits without end (reports/cpu/vllm_dead_core.py)."""
    processes = client.resources.engine_manager.processes

    def watch() -> None:
        wait([process.sentinel for process in processes])
        client.outputs_queue.put(EngineDeadError())
        for answer in list(client.utility_results.values()):
            answer.set_exception(EngineDeadError())

    Thread(target=watch, daemon=True).start()


def model_runner(engine: Any) -> Any:
    """Return the model runner of an engine whose core is in this process."""
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def add_request(engine: Any, key: int, prompt: Sequence[int], num_new: int) -> None:
    """Add a request that is continued greedily, and past every end-of-sequence token."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    engine.add_request(str(key), {"prompt_token_ids": list(prompt)}, params)


@contextmanager
def refusing(folder: Path | str) -> Iterator[None]:
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
