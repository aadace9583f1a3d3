"""Every name of vLLM that the adapter touches, and which of them a vLLM lacks: read from its source, never imported.

A version of vLLM whose source has all of these names may still mean something else by them: only a run can tell. A
version that lacks one breaks the adapter, and this says where.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

SURFACE: Mapping[str, tuple[str, ...]] = {
    # Functions, classes and variables of the environment, by their module
    "": ("EngineArgs", "SamplingParams", "__version__"),
    "config": ("set_current_vllm_config",),
    "distributed.parallel_state": ("cleanup_dist_env_and_memory",),
    "forward_context": ("get_forward_context",),
    "v1.core.sched.output": ("NewRequestData", "SchedulerOutput"),
    "v1.engine.exceptions": ("EngineDeadError",),
    "v1.engine.llm_engine": ("LLMEngine",),
    "v1.kv_cache_interface": ("AttentionSpec",),
    "envs": (
        "VLLM_USE_V2_MODEL_RUNNER", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL", "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_CPU_OMP_THREADS_BIND",
    ),
    # Opening an engine, and what it is given
    "engine.arg_utils:EngineArgs": (
        "model", "dtype", "enforce_eager", "skip_tokenizer_init", "async_scheduling", "disable_log_stats", "block_size",
        "kv_cache_memory_bytes", "gpu_memory_utilization", "worker_extension_cls", "max_model_len", "max_num_seqs",
        "max_num_batched_tokens", "enable_prefix_caching", "num_gpu_blocks_override", "long_prefill_token_threshold",
        "tensor_parallel_size", "distributed_executor_backend", "kv_cache_dtype", "create_model_config",
    ),
    "sampling_params:SamplingParams": ("temperature", "max_tokens", "ignore_eos", "detokenize"),
    "v1.engine.llm_engine:LLMEngine": (
        "from_engine_args", "add_request", "abort_request", "step", "has_unfinished_requests", "collective_rpc",
        "engine_core", "vllm_config",
    ),
    "config.vllm:VllmConfig": ("model_config",),
    "outputs:RequestOutput": ("request_id", "finished", "outputs"),
    "outputs:CompletionOutput": ("token_ids",),
    # From the engine to its model runner, and to its processes
    "v1.engine.core_client:EngineCoreClient": ("shutdown",),
    "v1.engine.core_client:InprocClient": ("engine_core",),
    "v1.engine.core_client:SyncMPClient": ("resources", "outputs_queue", "utility_results"),
    "v1.engine.core_client:BackgroundResources": ("engine_manager",),
    "v1.engine.utils:CoreEngineProcManager": ("processes",),
    "v1.engine.core:EngineCore": ("model_executor",),
    "v1.executor.uniproc_executor:UniProcExecutor": ("driver_worker",),
    "v1.executor.multiproc_executor:MultiprocExecutor": ("workers",),
    "v1.executor.multiproc_executor:WorkerProcHandle": ("proc", "rank"),
    "v1.worker.worker_base:WorkerWrapperBase": ("worker",),
    "v1.worker.gpu_worker:Worker": ("model_runner", "rank"),
    # The model runner, and a step of it
    "v1.worker.gpu_model_runner:GPUModelRunner": (
        "get_model", "sampler", "dtype", "kv_cache_dtype", "model_config", "cache_config", "compilation_config",
        "kv_cache_config", "input_batch", "query_start_loc", "max_num_reqs", "execute_model", "execute_model_state",
        "sample_tokens", "vllm_config",
    ),
    "v1.core.sched.output:SchedulerOutput": (
        "make_empty", "finished_req_ids", "scheduled_new_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens",
    ),
    "v1.core.sched.output:NewRequestData": (
        "req_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "block_ids",
        "num_computed_tokens", "lora_request",
    ),
    "v1.worker.gpu_input_batch:InputBatch": ("req_ids", "block_table"),
    "v1.worker.block_table:MultiGroupBlockTable": ("block_tables",),
    "v1.worker.block_table:BlockTable": ("get_numpy_array",),
    "v1.outputs:SamplerOutput": ("sampled_token_ids",),
    "v1.utils:CpuGpuBuffer": ("np",),
    "forward_context:ForwardContext": ("slot_mapping", "attn_metadata"),
    "v1.attention.backend:CommonAttentionMetadata": ("query_start_loc",),
    # What the runner is configured with
    "config.model:ModelConfig": (
        "get_vocab_size", "get_head_size", "enforce_eager", "dtype", "hf_text_config", "model_arch_config",
    ),
    "config.model_arch:ModelArchitectureConfig": ("derived_max_model_len_and_key",),
    "config.cache:CacheConfig": ("block_size", "cache_dtype"),
    "config.compilation:CompilationConfig": ("static_forward_context",),
    "v1.kv_cache_interface:KVCacheConfig": ("kv_cache_groups", "num_blocks"),
    "v1.kv_cache_interface:KVCacheGroupSpec": ("layer_names", "kv_cache_spec"),
    "v1.kv_cache_interface:AttentionSpec": ("block_size",),
    # Its layers
    "model_executor.layers.attention.attention:Attention": (
        "kv_cache", "num_kv_heads", "head_size", "impl", "sliding_window",
    ),
    "v1.attention.backend:AttentionLayer": ("_k_scale_float", "_v_scale_float"),
    "v1.attention.backends.flash_attn:FlashAttentionImpl": ("do_kv_cache_update",),
    "v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": ("do_kv_cache_update",),
    "model_executor.layers.linear:MergedColumnParallelLinear": ("output_partition_sizes",),
    "model_executor.layers.linear:QKVParallelLinear": ("output_partition_sizes",),
    "model_executor.layers.fused_moe.router.base_router:BaseRouter": ("set_capture_fn",),
}  # fmt: skip
"""Names by `module` or `module:Class`, below the package `vllm`. An instance's attributes count as its class's."""


def installed_source() -> Path | None:
    """Return the folder of the package `vllm` that is installed here."""
    spec = find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def missing_names(source: Path, surface: Mapping[str, Sequence[str]] = SURFACE) -> list[str]:
    """Return a sentence for each name of the surface that a folder of the package `vllm` lacks."""
    return [sentence for place, names in surface.items() for sentence in _missing_of(source, place, names)]


def _missing_of(source: Path, place: str, names: Sequence[str]) -> Iterator[str]:
    module, _, owner = place.partition(":")
    title = ".".join(filter(None, ("vllm", module)))
    defined = _top_level(source, module)
    if defined is None:
        yield f"there is no module {title}, of which the adapter needs {', '.join(filter(None, (owner, *names)))}"
        return
    if owner:
        title = f"{title}.{owner}"
        if not isinstance(defined.get(owner), ast.ClassDef):
            yield f"there is no class {title}, of which the adapter needs {', '.join(names)}"
            return
        present = _attributes(source, module, owner)
    else:
        present = set(defined)
    yield from (f"{title} has no {name}" for name in names if name not in present)


@cache
def _top_level(source: Path, module: str) -> dict[str, ast.AST] | None:
    """Return what a module defines or imports, also within `if` and `try`, by name; None if there is no such module."""
    path = source.joinpath(*filter(None, module.split(".")))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return None
    return dict(_named(ast.parse(file.read_text(encoding="utf-8")).body))


def _named(statements: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for statement in statements:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, statement
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((alias.asname or alias.name, statement) for alias in aliases)
            case ast.Assign(targets=targets):
                for target in targets:
                    yield from ((node.id, statement) for node in ast.walk(target) if isinstance(node, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, statement
            case ast.If() | ast.Try():
                for part in (statement.body, statement.orelse, getattr(statement, "finalbody", [])):
                    yield from _named(part)


def _attributes(source: Path, module: str, owner: str) -> set[str]:
    """Return the attributes of a class and of those that it is made of, as far as they are vLLM's.

    Attributes are what the body names, and what a method gives to its first argument.
    """
    defined = (_top_level(source, module) or {}).get(owner)
    if isinstance(defined, ast.ImportFrom) and (defined.module or "").startswith("vllm"):
        return _attributes(source, (defined.module or "").partition(".")[2], owner)
    if not isinstance(defined, ast.ClassDef):
        return set()
    names = {name for name, _ in _named(defined.body)}
    for node in ast.walk(defined):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    for base in defined.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        names |= _attributes(source, module, base.id) if isinstance(base, ast.Name) else set()
    return names
