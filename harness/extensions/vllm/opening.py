"""vLLM's engine opened for a block and given requests, and the fields of `EngineArgs` that it is opened with."""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.engine.llm_engine import LLMEngine

from harness.engines.adapter import Workload, engine_refusals, parse_value, refuse_unknown_options
from harness.errors import Code, HarnessError
from harness.extensions.vllm.steps import EXTENSION, watched_workers
from harness.formats.checkpoint.quantised import served_folder

SCHEDULES = ("plain", "chunked", "batched", "mixed", "prefix-hit", "preempted", "tensor-parallel")
_SAID_ELSEWHERE = {"model": "--model", "dtype": "--dtype", "tensor_parallel_size": "--schedule tensor-parallel:N"}


def parse_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `EngineArgs`; values are read as JSON where they are JSON, else as text.

    Raises:
        HarnessError: BAD_OPTION: no such field, or one that another option of the harness says.
    """
    for name in options:
        if name in _SAID_ELSEWHERE:
            what = f"the engine option {name!r} is said by another option"
            raise HarnessError(
                Code.BAD_OPTION, what, where="--engine-option", expected=_SAID_ELSEWHERE[name], actual=name
            )
    refuse_unknown_options("vllm", options, sorted(field.name for field in fields(EngineArgs)))
    return {name: parse_value(value) for name, value in options.items()}


def base_arguments(folder: Path, dtype: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `EngineArgs` of every run: no tokenizer, and a cache that is as small as the requests allow.

    Of a quantised checkpoint vLLM reads that itself, and not its dequantised weights.

    The length of requests is part of what a model computes: LongRoPE's factors follow from it. So a model is built for
    its own length, and not for that of the requests. With -1 vLLM does that, and takes no longer requests than its
    cache holds afterwards. vLLM 0.32 refuses -1 for a configuration without a length, from which nothing can follow.
    """
    arguments: dict[str, Any] = {
        "model": str(served_folder(folder)),
        "dtype": dtype,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 1 << 28,
        "gpu_memory_utilization": 0.01,  # with the bytes given, only what must be free at the start
        "worker_extension_cls": EXTENSION,
    }
    if options.get("kv_cache_memory_bytes", ...) is None:  # the cache gets vLLM's share of the memory
        del arguments["gpu_memory_utilization"]
    with engine_refusals("vLLM", folder):
        config = EngineArgs(**{**arguments, **options}).create_model_config()
    has_length = config.model_arch_config.derived_max_model_len_and_key[0] != float("inf")
    return arguments | ({"max_model_len": -1} if has_length else {})


def settings(arguments: Mapping[str, Any]) -> str:
    """Say what vLLM was opened with, for the report; the model is what the check is of."""
    chosen = {
        name: value for name, value in arguments.items() if name not in ("model", "dtype", "worker_extension_cls")
    }
    return ", ".join(f"{name}={value}" for name, value in chosen.items())


def schedule_limits(workload: Workload, *, block_size: int, num_groups: int) -> dict[str, Any]:
    """Translate a schedule into vLLM's own limits.

    Args:
        workload: with the schedule.
        block_size: tokens of a block.
        num_groups: groups of layers with blocks of their own: all of them; those with a window; ...
    """
    schedule = workload.schedule
    lengths = [len(request.token_ids) + 1 for request in workload.all_requests]
    limits: dict[str, Any] = {
        "max_num_seqs": max(map(len, workload.batches)),
        "max_num_batched_tokens": sum(lengths),
        "enable_prefix_caching": schedule.trigger == "prefix_hit",
        "num_gpu_blocks_override": 1 + num_groups * workload.num_blocks(block_size),  # and the null block
    }
    if schedule.chunk_size is not None:  # a lone prompt may use all of the budget: the budget is the chunk
        name = "long_prefill_token_threshold" if schedule.is_batched else "max_num_batched_tokens"
        limits[name] = schedule.chunk_size
    if schedule.num_ranks > 1:
        limits |= {"tensor_parallel_size": schedule.num_ranks, "distributed_executor_backend": "mp"}
    return limits


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
