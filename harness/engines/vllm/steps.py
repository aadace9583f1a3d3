"""Watches the steps of vLLM's model runner: what each computes, what its modules show, and what it chooses."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from vllm.forward_context import get_forward_context

from harness.engines.torch_modules import CacheLayout, ModuleRecorder, StepRows
from harness.engines.vllm.table import find_table
from harness.recording import RecordingWriter, RequestInfo
from harness.taps import Graph, site_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What is between a forward of the model and the sampling behind it."""

    rows: StepRows
    last_rows: Sequence[int]
    """Last row of each of the batch's requests: vLLM samples from all of them."""
    finished: Sequence[int]
    """Requests whose last row this is."""
    block_tables: Mapping[str, Mapping[int, list[int]]]
    """Blocks of each request, by the name of the attention layer."""
    resources: ExitStack = field(default_factory=ExitStack)


class StepWatcher:
    """Records the steps of a runner while the block runs, and feeds the requests' own tokens.

    A step begins with the model's forward and ends with the sampler, which is told another choice than its own.
    """

    def __init__(
        self,
        runner: Any,
        graph: Graph,
        requests: Sequence[RequestInfo],
        writer: RecordingWriter,
        *,
        reads_back: bool = True,
    ) -> None:
        """Watch `runner`, a `GPUModelRunner` or one made of it.

        Args:
            runner: vLLM's.
            graph: of the model.
            requests: that the engine will be given.
            writer: gets the steps.
            reads_back: whether to read a request's cache at its end.
        """
        self._runner, self._writer = runner, writer
        self._requests = {request.id: request for request in requests}
        model = runner.get_model()
        self._recorder = ModuleRecorder(model, find_table(model, graph))
        self._routers = _routers(model, graph)
        shown = {site_of(tap) for tap in self._routers}
        self.lacking = tuple(site for site in self._recorder.lacking(graph) if site not in shown)
        self._caches = _Caches(runner, graph) if reads_back else None
        self._step: _Step | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.callback(self._runner.get_model().register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        self._stack.callback(self._runner.sampler.register_forward_hook(self._end).remove)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._step is not None:
            self._step.resources.close()
        self._stack.close()

    def _begin(self, _model: Any, _args: Any, given: Mapping[str, Any]) -> None:
        step = self._read_step(given)
        self._step = step
        recorder = step.resources.enter_context(self._recorder.step(self._writer, step.rows))
        for tap, router in self._routers.items():
            router.set_capture_fn(partial(recorder.tap, tap))
            step.resources.callback(router.set_capture_fn, None)

    def _read_step(self, given: Mapping[str, Any]) -> _Step:
        """Return what the step computes, from vLLM's metadata of it and the batch's requests."""
        metadata: Mapping[str, Any] = get_forward_context().attn_metadata
        any_layer = next(iter(metadata.values()))
        starts = any_layer.query_start_loc.tolist()
        ids = [int(name.partition("-")[0]) for name in self._runner.input_batch.req_ids]
        starts = starts[: len(ids) + 1]
        num_rows = starts[-1]
        request = [key for key, start, stop in zip(ids, starts, starts[1:], strict=False) for _ in range(start, stop)]
        position = given["positions"].reshape(-1)[:num_rows].tolist()
        last = [stop - 1 for stop in starts[1:]]
        tables = self._block_tables(ids, [position[row] + 1 for row in last])
        sampled = [row for row in last if position[row] >= self._requests[request[row]].prompt_length - 1]
        rows = StepRows(
            phase=self._phase(request, position),
            request=request,
            position=position,
            token_ids=[self._requests[key].token_ids[at] for key, at in zip(request, position, strict=True)],
            sampled_rows=sampled,
            sampled_kept=None if sampled == last else [last.index(row) for row in sampled],
            kept=None if len(given["input_ids"]) == num_rows else range(num_rows),
            paging={
                "slot_mapping": any_layer.slot_mapping[:num_rows],
                "block_tables": next(iter(tables.values())),
            },
        )
        finished = [
            key for key, row in zip(ids, last, strict=True) if position[row] == len(self._requests[key].token_ids) - 1
        ]
        return _Step(rows=rows, last_rows=last, finished=finished, block_tables=tables)

    def _block_tables(self, ids: Sequence[int], num_tokens: Sequence[int]) -> dict[str, dict[int, list[int]]]:
        """Return the tables as the runner keeps them: what the attention kernel is given may be another."""
        size = int(self._runner.cache_config.block_size)
        tables: dict[str, dict[int, list[int]]] = {}
        groups = self._runner.kv_cache_config.kv_cache_groups
        for group, table in zip(groups, self._runner.input_batch.block_table.block_tables, strict=True):
            rows = table.get_numpy_array()[: len(ids)].tolist()
            own = {key: row[: -(-count // size)] for key, row, count in zip(ids, rows, num_tokens, strict=True)}
            tables |= dict.fromkeys(group.layer_names, own)
        return tables

    def _phase(self, request: Sequence[int], position: Sequence[int]) -> str:
        """Return the step's phase; a lone row behind a prompt is decode, several (computed again) are prefill."""
        phases = {
            "decode" if request.count(key) == 1 and at >= self._requests[key].prompt_length else "prefill"
            for key, at in zip(request, position, strict=True)
        }
        return phases.pop() if len(phases) == 1 else "mixed"

    def _end(self, _sampler: Any, _args: Any, output: Any) -> None:
        step, self._step = self._step, None
        assert step is not None
        step.resources.close()
        chosen = dict(zip(step.last_rows, output.sampled_token_ids[:, 0].tolist(), strict=True))
        self._writer.end_step([chosen[row] for row in step.rows.sampled_rows])
        for place, row in enumerate(step.last_rows):
            request, behind = self._requests[step.rows.request[row]], step.rows.position[row] + 1
            if behind < len(request.token_ids):
                output.sampled_token_ids[place] = request.token_ids[behind]
        if self._caches is not None:
            for key in step.finished:
                self._read_back(self._caches, key, step)

    def _read_back(self, caches: "_Caches", key: int, step: _Step) -> None:
        """Record what the cache holds of a request; its blocks are free after this step."""
        num_rows = len(self._requests[key].token_ids)
        taps = list(caches.read(key, num_rows, step.block_tables))
        if not taps:
            return
        partial_rows = {tap: range(first, num_rows) for tap, first, _rows in taps if first}
        self._writer.begin_step(
            phase="readback", request=[key] * num_rows, position=range(num_rows), partial_rows=partial_rows or None
        )
        for tap, _first, rows in taps:
            self._writer.tap(tap, rows)
        self._writer.end_step()


def _routers(model: nn.Module, graph: Graph) -> dict[str, Any]:
    """Return the routers of a mixture of experts by the tap of their choice, which vLLM shows to a function."""
    routers = ((path, getattr(module, "router", None)) for path, module in model.named_modules())
    taps = ((f"{path.rpartition('.')[0]}.gate.topk", router) for path, router in routers)
    return {tap: router for tap, router in taps if tap in graph and hasattr(router, "set_capture_fn")}


class _Caches:
    """The attention layers' caches, read through block tables; their layout is learned from the backend's writer."""

    def __init__(self, runner: Any, graph: Graph) -> None:
        self._block_size = int(runner.cache_config.block_size)
        layers = runner.compilation_config.static_forward_context
        self._layers = {name: layer for name, layer in layers.items() if getattr(layer, "kv_cache", None) is not None}
        self._graph = graph
        self._layouts: dict[tuple[object, ...], CacheLayout] = {}

    def read(
        self, key: int, num_rows: int, block_tables: Mapping[str, Mapping[int, list[int]]]
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield each tap, its first position and its rows, of one request; a sliding layer keeps its window only."""
        for name, layer in self._layers.items():
            prefix = name.partition("self_attn")[0]
            window = getattr(layer, "sliding_window", None)
            first = 0 if window is None else max(0, num_rows - window)
            blocks = block_tables[name][key]
            slots = [
                blocks[at // self._block_size] * self._block_size + at % self._block_size
                for at in range(first, num_rows)
            ]
            for part, tap in enumerate(("k_cache", "v_cache")):
                if prefix + tap in self._graph:
                    yield prefix + tap, first, self._layout(layer, part).read(layer.kv_cache, slots)

    def _layout(self, layer: Any, part: int) -> CacheLayout:
        cache = layer.kv_cache
        kind = (part, cache.dtype, tuple(cache.shape), cache.stride())
        if kind not in self._layouts:
            self._layouts[kind] = CacheLayout.learn(
                cache,
                partial(_store, layer, part),
                num_slots=len(cache) * self._block_size,
                row_shape=(layer.num_kv_heads, layer.head_size),
            )
        return self._layouts[kind]


def _store(layer: Any, part: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows as keys, or as values, through the backend's own writer."""
    parts = [torch.zeros_like(rows), torch.zeros_like(rows)]
    parts[part] = rows
    layer.impl.do_kv_cache_update(layer, *parts, layer.kv_cache, slots)
