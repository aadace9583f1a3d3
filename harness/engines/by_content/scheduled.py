"""Records the steps of a live engine that runs its own scheduler, by a map that was learned from small steps.

An engine's adapter says what a step computes (`ForwardBatch`), from the metadata that its scheduler has made, and
learns the map from steps of its model alone. The rest is the same for all engines: rows and phases, the tokens that are
forced, what the cache holds at a request's end.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import count, pairwise
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from harness.engines.by_content.forwards import SiteRows, StepForward
from harness.engines.by_content.learn import learn_map
from harness.engines.by_content.rows import PADDING, RequestWork, Told
from harness.engines.by_content.steps import RETURNED, Lookup, Site, SiteWatcher, Stepper
from harness.engines.by_content.tap_map import TapMap
from harness.engines.paged_cache import BlockTables, CacheReader, PagedCache
from harness.engines.record import write_read_back
from harness.errors import Code, HarnessError
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import Graph
from harness.oracle.model import load_model


def learn_taps(stepper: Stepper, folder: Path, graph: Graph, dtype: str) -> TapMap:
    """Learn the map of an engine, of which `stepper` runs the model, against HF's model in float32."""
    hf = load_model(folder, dtype=torch.float32, stays=True, mtp=graph.has_mtp, may_be_patched=True)
    return learn_map(stepper, hf, dtype=getattr(torch, dtype), numbers=count())


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One forward of an engine's model."""

    requests: Sequence[int]
    """Ids, in the order of their rows."""
    starts: Sequence[int]
    """First row of each request, and after them the number of rows: `query_start_loc`, `cu_seqlens_q`."""
    positions: Sequence[int]
    """Of each row; the engine's tensors may have further rows behind these, which are padding."""
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


@dataclass(slots=True, kw_only=True)
class _Step:
    """State between a forward of the model and the sampling that follows it."""

    batch: ForwardBatch
    request: Sequence[int]
    """Of each row."""
    forwards: list[StepForward]
    shown: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values [rows, ...] of taps that a function was given."""


class StepWatcher(ABC):
    """Records the steps of an engine while the block runs, and feeds the requests' own tokens.

    A step begins with the model's forward and ends with the sampler, whose choice is replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        sampler: nn.Module,
        tap_map: TapMap,
        graph: Graph,
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
            tap_map: where the taps are, learned from a stepper that has `model` among its attributes.
            graph: of HF's model.
            requests: that the engine will be given.
            writer: gets the steps.
            caches: are read back when a request has ended.
            begins: module whose forward begins a step, where it is not the model's.
        """
        self._begins, self._sampler, self._map, self._graph = begins or model, sampler, tap_map, graph
        self._requests = {request.id: request for request in requests}
        self._writer, self._caches = writer, CacheReader(caches)
        self._sampled_only = {tap for tap, at in tap_map.taps.items() if at.is_sampled_only or tap in graph.head}
        names = {module: path for path, module in model.named_modules()}
        lookups = tap_map.teller.lookups
        self._sites = SiteWatcher(names, self._see, only=tap_map.sites, lookups=lookups, on_ids=self._look_up)
        self._step: _Step | None = None
        self._stack = ExitStack()

    @abstractmethod
    def read_batch(self, arguments: Mapping[str, Any]) -> ForwardBatch:
        """Return what a forward computes; `arguments` are the model's, those by place under their names."""

    @abstractmethod
    def logits(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> torch.Tensor:
        """Return the logits [requests, vocabulary] among what the sampler is given."""

    @abstractmethod
    def sampled_tokens(self, output: Any) -> torch.Tensor:
        """Return the sampler's choice for each request of the batch, [requests], as a view: it is written into."""

    def taps_by_function(self) -> Mapping[str, Callable[[Callable[[torch.Tensor], None] | None], None]]:
        """Return, by tap that is no tensor of numbers, what is given a function that takes it in each step."""
        return {}

    def unsupported_taps(self) -> tuple[str, ...]:
        """Return the sites and taps of the model that are not shown, for `Capabilities.unsupported_taps`."""
        caches = self._graph.not_shown(self._caches.taps, caches=True)
        return (*self._graph.not_shown({*self._map.taps, *self.taps_by_function()}), *caches)

    def __enter__(self) -> Self:
        for tap, show_to in self.taps_by_function().items():
            show_to(lambda value, tap=tap: self._show(tap, value))  # type: ignore[misc]
            self._stack.callback(show_to, None)
        self._stack.enter_context(_before_forward(self._begins, self._begin))
        self._stack.enter_context(self._sites)
        self._stack.callback(self._sampler.register_forward_pre_hook(self._compute, with_kwargs=True).remove)
        self._stack.callback(self._sampler.register_forward_hook(self._end).remove)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _begin(self, arguments: Mapping[str, Any]) -> None:
        batch = self.read_batch(arguments)
        spans = zip(batch.requests, pairwise(batch.starts), strict=True)
        request = [key for key, (start, stop) in spans for _ in range(start, stop)]
        forwards = [] if self._map.teller.lookups else [StepForward(None, torch.empty(0, 0))]
        self._step = _Step(batch=batch, request=request, forwards=forwards)
        self._sites.begin_again()

    def _look_up(self, lookup: Lookup, ids: torch.Tensor, _makes_numbers: bool) -> None:
        if self._step is not None:
            self._step.forwards.append(StepForward(lookup, ids.reshape(1, -1)))

    def _see(self, site: Site, tensor: torch.Tensor) -> None:
        if self._step is not None and self._step.forwards:
            self._step.forwards[-1].tensors[site] = tensor.clone()

    def _show(self, tap: str, value: torch.Tensor) -> None:
        if self._step is not None:
            self._step.shown[tap] = value.clone()

    def _compute(self, _sampler: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Record what the model has computed, before the sampler changes its logits."""
        step = self._step
        assert step is not None
        rows, batch = range(len(step.request)), step.batch
        sampled = [row for row in batch.last_rows if self._is_sampled(step, row)]
        taps = {tap: self._kept(tap, *item, sampled) for tap, item in self._read(step, arguments, named).items()}
        taps |= {tap: (value[: len(rows)], list(rows)) for tap, value in step.shown.items()}
        taps = {tap: (values, kept) for tap, (values, kept) in taps.items() if kept}
        self._writer.begin_step(
            phase=self._phase(step.request, batch.positions),
            request=step.request,
            position=batch.positions,
            sampled_rows=sampled,
            partial_rows={
                tap: kept for tap, (_, kept) in taps.items() if len(kept) < len(rows) or tap in self._sampled_only
            },
            slot_mapping=batch.slot_mapping,
            block_tables=next(iter(batch.tables_in_use.values()), None),
        )
        for tap, (values, _) in taps.items():
            shape = self._graph[tap].shape
            is_whole = values[0].numel() == prod(shape)  # and not a rank's part
            self._writer.tap(tap, values.reshape(len(values), *shape) if is_whole else values)

    def _is_sampled(self, step: _Step, row: int) -> bool:
        """Whether a token is chosen from a row; engines also compute the logits of a prompt's piece."""
        return step.batch.positions[row] >= self._requests[step.request[row]].prompt_length - 1

    def _read(
        self, step: _Step, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> dict[str, tuple[torch.Tensor, list[int]]]:
        """Return the values of each tap, and their rows."""
        batch, teller = step.batch, self._map.teller
        work = [
            RequestWork(self._requests[key].token_ids[: batch.positions[stop - 1] + 1], batch.positions[start])
            for key, (start, stop) in zip(batch.requests, pairwise(batch.starts), strict=True)
        ]
        shown = teller.in_order(step.forwards, work, self._told(step))
        logits = self.logits(arguments, named)
        is_known = torch.ones(len(logits), dtype=torch.bool)
        shown[Site("", 0, RETURNED)] = SiteRows(logits.clone(), is_known, is_by_request=True)
        return self._map.read(shown, batch.last_rows)

    def _told(self, step: _Step) -> Told | None:
        """Return the rows of the step's one forward: the engine says which they are, and computes no others.

        Raises:
            HarnessError: ENGINE_FAILED: other tokens were fed than those that are forced.
        """
        if not self._map.teller.lookups:
            return None
        if len(step.forwards) != 1:
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                f"the engine looks token ids up {len(step.forwards)} times in a step of its model",
                where=type(self).__name__,
                expected="one forward of the model before the sampler is called",
            )
        num_rows = len(step.request)
        ids = step.forwards[0].ids
        actual = ids.flatten()[:num_rows].tolist()
        expected = [
            self._requests[key].token_ids[at] for key, at in zip(step.request, step.batch.positions, strict=True)
        ]
        if actual != expected:
            at = next((at for at, pair in enumerate(zip(actual, expected, strict=False)) if pair[0] != pair[1]), 0)
            raise HarnessError(
                Code.ENGINE_FAILED,
                "the engine was fed other tokens than those that are forced",
                where=f"{type(self).__name__}: row {at} of a step of {num_rows}",
                expected=str(expected[at : at + 4]),
                actual=str(actual[at : at + 4]),
                hint="feed the tokens of the request, not those that the engine would have chosen",
            )
        rows = torch.full((1, ids.numel()), PADDING)
        rows[0, :num_rows] = torch.arange(num_rows)
        return Told([rows])

    def _kept(
        self, tap: str, values: torch.Tensor, rows: list[int], sampled: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the values and rows to record: all, or the sampled rows if an engine may compute those alone."""
        if tap not in self._sampled_only:
            return values, rows
        kept = [at for at, row in enumerate(rows) if row in {*sampled}]
        return values[kept], [rows[at] for at in kept]

    def _phase(self, request: Sequence[int], position: Sequence[int]) -> str:
        """Return the step's phase; a lone row after a prompt is decode, several (computed again) are prefill."""
        phases = {
            "decode" if request.count(key) == 1 and at >= self._requests[key].prompt_length else "prefill"
            for key, at in zip(request, position, strict=True)
        }
        return phases.pop() if len(phases) == 1 else "mixed"

    def _end(self, _sampler: Any, _arguments: Any, output: Any) -> None:
        step, self._step = self._step, None
        assert step is not None
        tokens, last = self.sampled_tokens(output), step.batch.last_rows
        chosen = dict(zip(last, tokens.tolist(), strict=True))
        self._writer.end_step([chosen[row] for row in last if self._is_sampled(step, row)])
        for place, row in enumerate(last):
            request, behind = self._requests[step.request[row]], step.batch.positions[row] + 1
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
