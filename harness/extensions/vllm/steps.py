"""The steps of vLLM's model runner: what each computes and chooses, and what its caches are.

Each rank records its own part in its process, the parts are merged, and a process that ends is named.
"""

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import product
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.kv_cache_interface import AttentionSpec

from harness.base.files import scratch_folder
from harness.base.numerics import Numerics
from harness.engines.by_content.scheduled import ForwardBatch, StepWatcher
from harness.engines.paged_cache import PagedCache
from harness.engines.process import watched_processes
from harness.errors import Code, HarnessError
from harness.extensions.vllm.learned import LearnedTaps
from harness.formats.checkpoint.quantised import cache_scales
from harness.formats.recording import ModelInfo, Producer, Recording, RecordingWriter, RequestInfo, RunInfo
from harness.formats.recording.merge import merge_ranks
from harness.formats.taps import Graph, Kind, layer_of, prefix_of

_CACHE_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Names of torch's dtypes, by vLLM's `kv_cache_dtype`."""


class VllmWatcher(StepWatcher):
    """Watches a `GPUModelRunner`, or one made of it; see `StepWatcher`."""

    def __init__(
        self, runner: Any, graph: Graph, learned: LearnedTaps, requests: Sequence[RequestInfo], writer: RecordingWriter
    ) -> None:
        model = runner.get_model()
        tap_map = learned.on_rank(model)
        # What a cache gives back is held to what was written. Where no tensor shows that, it would be held to HF's own,
        # from which a router's tie may have led far away. A compiled model shows no tensor: its caches are all it has.
        is_compiled = not runner.model_config.enforce_eager
        shown = tap_map.taps.keys()
        caches = [cache for cache in _caches(runner, graph) if is_compiled or graph[cache.tap].inputs[0] in shown]
        super().__init__(model, runner.sampler, tap_map, graph, requests, writer, caches=caches)
        self._runner, self._routers = runner, _routers(model, graph)
        groups = _attending_groups(runner)
        self._attending = {name for _, group in groups for name in group.layer_names}
        sizes = [int(group.kv_cache_spec.block_size) for _, group in groups]
        self._block_size = sizes[0] if sizes else int(runner.cache_config.block_size)

    def read_batch(self, arguments: Mapping[str, Any]) -> ForwardBatch:
        """Read vLLM's metadata of the step; requests of vLLM are named by our ids, and by a suffix of vLLM's."""
        requests = [int(name.partition("-")[0]) for name in self._runner.input_batch.req_ids]
        starts = self._runner.query_start_loc.np[: len(requests) + 1].tolist()  # not all metadata of layers has them
        positions = arguments["positions"].reshape(-1)[: starts[-1]].tolist()
        return ForwardBatch(
            requests=requests,
            starts=starts,
            positions=positions,
            slot_mapping=_slot_mapping(self._attending, starts[-1]),
            block_tables=self._block_tables(requests),
            block_size=self._block_size,
        )

    def _block_tables(self, requests: Sequence[int]) -> dict[str, dict[int, list[int]]]:
        """Return the tables as the runner keeps them: what the attention kernel is given may be another."""
        tables = self._runner.input_batch.block_table.block_tables
        rows = (table.get_numpy_array()[: len(requests)].tolist() for table in tables)
        return {str(group): dict(zip(requests, row, strict=True)) for group, row in enumerate(rows)}

    def logits(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> torch.Tensor:
        """See `StepWatcher.logits`."""
        logits: torch.Tensor = named["logits"] if "logits" in named else arguments[0]
        return logits

    def sampled_tokens(self, output: Any) -> torch.Tensor:
        """See `StepWatcher.sampled_tokens`."""
        tokens: torch.Tensor = output.sampled_token_ids
        return tokens[:, 0]

    def taps_by_function(self) -> Mapping[str, Any]:
        """Return what routers of a mixture of experts show their choice to."""
        return {tap: router.set_capture_fn for tap, router in self._routers.items()}


def _attending_groups(runner: Any) -> list[tuple[int, Any]]:
    """Return number and description of the groups of layers that keep keys and values: others keep a state."""
    groups = enumerate(runner.kv_cache_config.kv_cache_groups)
    return [(number, group) for number, group in groups if isinstance(group.kv_cache_spec, AttentionSpec)]


def _slot_mapping(attending: Collection[str], num_rows: int) -> torch.Tensor | None:
    """[rows] of the first of these layers that has slots; None for a model without attention."""
    by_layer = get_forward_context().slot_mapping
    mappings = by_layer.items() if isinstance(by_layer, Mapping) else ()
    return next((mapping[:num_rows] for name, mapping in mappings if name in attending and mapping is not None), None)


def _routers(model: nn.Module, graph: Graph) -> dict[str, Any]:
    """Return routers by the tap of their choice; where HF's first choice is one within groups, they do not show it."""
    routers = ((path, getattr(module, "router", None)) for path, module in model.named_modules())
    taps = ((f"{path.rpartition('.')[0]}.gate.topk", router) for path, router in routers)
    shown = ((tap, router) for tap, router in taps if tap in graph and len(graph[tap].shape) == 1)
    return {tap: router for tap, router in shown if hasattr(router, "set_capture_fn")}


def keeps_readable_cache(runner: Any) -> bool:
    """Whether keys and values are kept in the model's dtype."""
    return bool(runner.kv_cache_dtype == runner.dtype)


def declared_numerics(runner: Any, folder: Path) -> Numerics | None:
    """Return the cache's dtype where it is not the model's, with the scales that the checkpoint of a folder has for it.

    Without any they are those that vLLM has: what is in the checkpoint is what vLLM is held to.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: a format of the cache that the harness cannot compute.
    """
    if keeps_readable_cache(runner):
        return None
    name, layers = runner.cache_config.cache_dtype, runner.compilation_config.static_forward_context.items()
    if name in _CACHE_DTYPES:
        default_scales = {
            f"{prefix_of(path)}{part}_cache": (float(getattr(layer, f"_{part}_scale_float")),)
            for path, layer in layers
            for part in "kv"
            if hasattr(layer, f"_{part}_scale_float")
        }
        scales = default_scales | cache_scales(folder)
        return Numerics(cache=_CACHE_DTYPES[name], cache_scales=scales if set(scales.values()) != {(1.0,)} else {})
    raise HarnessError(
        Code.ENGINE_CANNOT_SERVE,
        "the harness does not know the format of vLLM's cache, so attention that reads it cannot be judged",
        where="--engine-option kv_cache_dtype",
        expected=f"auto, or one of {', '.join(_CACHE_DTYPES)}",
        actual=name,
    )


def _caches(runner: Any, graph: Graph) -> Iterator[PagedCache]:
    """Yield the caches of the attention layers that can be read back; keys and values of one share a tensor."""
    if not keeps_readable_cache(runner):
        return
    taps = {(op.layer, op.site): op.tap for op in graph if op.kind is Kind.CACHE}
    layers = runner.compilation_config.static_forward_context
    for group, spec in _attending_groups(runner):
        block_size = int(spec.kv_cache_spec.block_size)
        for name, part in product(spec.layer_names, range(2)):
            layer, tap = layers[name], taps.get((layer_of(name), ("k_cache", "v_cache")[part]))
            if tap is not None:
                yield PagedCache(
                    tap=tap,
                    tensor=layer.kv_cache,
                    write=partial(_store, layer, part),
                    num_slots=len(layer.kv_cache) * block_size,
                    block_size=block_size,
                    row_shape=(layer.num_kv_heads, layer.head_size),
                    group=str(group),
                    window=getattr(layer, "sliding_window", None),
                )


def _store(layer: Any, part: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows as keys, or as values, through the backend's own writer."""
    parts = [torch.zeros_like(rows), torch.zeros_like(rows)]
    parts[part] = rows
    layer.impl.do_kv_cache_update(layer, *parts, layer.kv_cache, slots)


class RankRecorder:
    """Methods added to each of vLLM's workers (`worker_extension_cls`); called by `collective_rpc`."""

    rank: int
    model_runner: Any

    def harness_begin(self, folder: str, told: bytes) -> list[str]:
        """Begin to record into `folder/rank-N`; `told` are what `recorded_workers` packs. Return what is not shown."""
        graph, learned, infos = pickle.loads(told)
        self.harness_resources = ExitStack()
        writer = RecordingWriter(
            Path(folder) / f"rank-{self.rank}",
            RunInfo(
                producer=Producer(name="harness.extensions.vllm", version="rank"),
                model=ModelInfo(id="rank"),
                dtype="any",
                device="any",
            ),
            infos,
        )
        self.harness_resources.enter_context(writer)
        watcher = VllmWatcher(self.model_runner, graph, learned, infos, writer)
        self.harness_resources.enter_context(watcher)
        return list(watcher.unsupported_taps())

    def harness_end(self) -> None:
        """Finish the recording."""
        self.harness_resources.close()


EXTENSION = f"{RankRecorder.__module__}.{RankRecorder.__name__}"


@contextmanager
def recorded_workers(
    engine: Any, graph: Graph, learned: LearnedTaps, requests: Sequence[RequestInfo], writer: RecordingWriter
) -> Iterator[tuple[str, ...]]:
    """Record what the block does on every rank, merge it into `writer`, and yield what is not shown."""
    told = pickle.dumps((graph, learned, list(requests)))  # as bytes, which vLLM sends as they are
    with scratch_folder(".ranks-", writer.path.parent) as folder:
        unsupported = engine.collective_rpc("harness_begin", args=(str(folder), told))
        yield tuple(unsupported[0])
        engine.collective_rpc("harness_end")
        with ExitStack() as stack:
            ranks = [stack.enter_context(Recording.open(folder / f"rank-{rank}")) for rank in range(len(unsupported))]
            merge_ranks(ranks, graph, writer)


def watched_workers(engine: Any) -> AbstractContextManager[None]:
    """Name the process of the engine that ends in the block; see `watched_processes`."""
    client = engine.engine_core
    return watched_processes("vLLM", _processes(client), wake=partial(_end_waiting, client))


def _processes(client: Any) -> dict[str, BaseProcess]:
    """Return the processes that an engine has started by itself."""
    if hasattr(client, "resources"):
        (core,) = client.resources.engine_manager.processes
        return {"vLLM's engine core": core}
    workers = getattr(client.engine_core.model_executor, "workers", ())
    return {f"rank {worker.rank} of {len(workers)}": worker.proc for worker in workers}


def _end_waiting(client: Any) -> None:
    """Let a client raise whose engine core has ended: vLLM's own waits without end (reports/cpu/vllm_dead_core.py)."""
    if hasattr(client, "outputs_queue"):
        client.outputs_queue.put(EngineDeadError())
        for answer in list(client.utility_results.values()):
            answer.set_exception(EngineDeadError())
