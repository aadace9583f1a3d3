"""Watches the steps of a live engine: a forward of its model, then the sampling after it.

An engine's adapter says what a step computes (`ForwardBatch`), from the metadata that its scheduler has made. The rest
is the same for all engines: rows and phases, the tokens that are forced, what the cache holds at a request's end.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import pairwise
from typing import Any, Self

import torch
from torch import nn

from harness.engines.read_back import write_read_back
from harness.engines.torch_modules.paged_cache import BlockTables, CacheReader, PagedCache
from harness.engines.torch_modules.recorder import ModuleRecorder, StepRecorder, StepRows
from harness.engines.torch_modules.table import Entry
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One forward of an engine's model."""

    requests: Sequence[int]
    """Ids, in the order of their rows."""
    starts: Sequence[int]
    """First row of each request, and after them the number of rows: `query_start_loc`, `cu_seqlens_q`."""
    positions: Sequence[int]
    """Of each row."""
    num_padded_rows: int
    """Rows of the tensors: more than there are positions, where the engine pads them."""
    slot_mapping: torch.Tensor | None
    """[rows]; None for a model without a cache of keys and values."""
    block_tables: BlockTables = field(default_factory=dict)
    """A row of a request may be longer than its blocks, where `block_size` is given."""
    block_size: int | None = None

    @property
    def last_rows(self) -> list[int]:
        """Last row of each request: engines sample from all of them."""
        return [stop - 1 for stop in self.starts[1:]]

    @property
    def tables_in_use(self) -> BlockTables:
        """Block tables up to the block of each request's last row."""
        if self.block_size is None:
            return self.block_tables
        last = dict(zip(self.requests, (self.positions[row] for row in self.last_rows), strict=True))
        return {
            group: {request: rows[request][: at // self.block_size + 1] for request, at in last.items()}
            for group, rows in self.block_tables.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """State between a forward of the model and the sampling that follows it."""

    batch: ForwardBatch
    rows: StepRows
    resources: ExitStack = field(default_factory=ExitStack)


class StepWatcher(ABC):
    """Records the steps of an engine while the block runs, and feeds the requests' own tokens.

    A step begins with the model's forward and ends with the sampler, whose choice is replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        sampler: nn.Module,
        table: Sequence[Entry],
        requests: Sequence[RequestInfo],
        writer: RecordingWriter,
        *,
        caches: Sequence[PagedCache] = (),
        begins: nn.Module | None = None,
    ) -> None:
        """Watch a model and the sampler after it.

        Args:
            model: whose forward computes all but the logits, or all.
            sampler: called once after each forward.
            table: which of HF's values the modules show.
            requests: that the engine will be given.
            writer: gets the steps.
            caches: to be read at the end of a request.
            begins: module of the model whose forward begins a step, where that is not the model's own.
        """
        self._begins, self._sampler, self._writer = begins or model, sampler, writer
        self._requests = {request.id: request for request in requests}
        self._recorder, self._caches = ModuleRecorder(model, table), CacheReader(caches)
        self._step: _Step | None = None
        self._stack = ExitStack()

    @abstractmethod
    def read_batch(self, given: Mapping[str, Any]) -> ForwardBatch:
        """Return what a forward computes; `given` are the model's arguments, those by place under their names."""

    @abstractmethod
    def sampled_tokens(self, output: Any) -> torch.Tensor:
        """Return the sampler's choice for each request of the batch, [requests], as a view: it is written into."""

    def taps_by_function(self) -> Mapping[str, Callable[[Callable[[torch.Tensor], None] | None], None]]:
        """Return, by tap that no module shows, what is given a function that takes it in each step, then None."""
        return {}

    def unsupported_taps(self, graph: Graph) -> tuple[str, ...]:
        """Return the sites and taps of a model that are not shown, for `Capabilities.unsupported_taps`."""
        caches = graph.not_shown(self._caches.taps, caches=True)
        return (*self._recorder.unsupported_taps(graph, self.taps_by_function()), *caches)

    def __enter__(self) -> Self:
        self._stack.enter_context(_before_forward(self._begins, self._begin))
        self._stack.callback(self._sampler.register_forward_hook(self._end).remove)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._step is not None:
            self._step.resources.close()
        self._stack.close()

    def _begin(self, given: Mapping[str, Any]) -> None:
        batch = self.read_batch(given)
        self._step = step = _Step(batch=batch, rows=self._rows(batch))
        recorder: StepRecorder = step.resources.enter_context(self._recorder.step(self._writer, step.rows))
        for tap, show_to in self.taps_by_function().items():
            show_to(partial(recorder.tap, tap))
            step.resources.callback(show_to, None)

    def _rows(self, batch: ForwardBatch) -> StepRows:
        position = batch.positions
        spans = zip(batch.requests, pairwise(batch.starts), strict=True)
        request = [key for key, (start, stop) in spans for _ in range(start, stop)]
        last = batch.last_rows
        sampled = [row for row in last if position[row] >= self._requests[request[row]].prompt_length - 1]
        tables = next(iter(batch.tables_in_use.values()), None)
        return StepRows(
            phase=self._phase(request, position),
            request=request,
            position=position,
            token_ids=[self._requests[key].token_ids[at] for key, at in zip(request, position, strict=True)],
            sampled_rows=sampled,
            sampled_kept=None if sampled == last else [last.index(row) for row in sampled],
            kept=None if batch.num_padded_rows == len(position) else range(len(position)),
            paging={"slot_mapping": batch.slot_mapping, "block_tables": tables},
        )

    def _phase(self, request: Sequence[int], position: Sequence[int]) -> str:
        """Return the step's phase; a lone row after a prompt is decode, several (computed again) are prefill."""
        phases = {
            "decode" if request.count(key) == 1 and at >= self._requests[key].prompt_length else "prefill"
            for key, at in zip(request, position, strict=True)
        }
        return phases.pop() if len(phases) == 1 else "mixed"

    def _end(self, _sampler: Any, _args: Any, output: Any) -> None:
        step, self._step = self._step, None
        assert step is not None
        step.resources.close()
        tokens, rows = self.sampled_tokens(output), step.rows
        chosen = dict(zip(step.batch.last_rows, tokens.tolist(), strict=True))
        self._writer.end_step([chosen[row] for row in rows.sampled_rows])
        for place, row in enumerate(step.batch.last_rows):
            request, behind = self._requests[rows.request[row]], rows.position[row] + 1
            if behind < len(request.token_ids):
                tokens[place] = request.token_ids[behind]
            else:
                self._read_back(request, step.batch.block_tables)

    def _read_back(self, request: RequestInfo, block_tables: BlockTables) -> None:
        """Record what the cache holds of a request that ends; its blocks are free after this step."""
        held = self._caches.read(request.id, len(request.token_ids), block_tables)
        write_read_back(self._writer, request, held)


@contextmanager
def _before_forward(model: nn.Module, function: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Call a function with the arguments of each forward, by name, before it runs.

    No hook does that: engines call `forward` past all hooks (SGLang's runner, models that vLLM may compile as a whole).
    """
    before, forward = vars(model).get("forward"), model.forward
    names = list(inspect.signature(forward).parameters)

    @wraps(forward)
    def announced(*args: Any, **kwargs: Any) -> Any:
        function({**dict(zip(names, args, strict=False)), **kwargs})
        return forward(*args, **kwargs)

    model.forward = announced
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before
