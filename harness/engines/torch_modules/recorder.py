"""Records the steps of a live engine from its modules: a forward of its model, then the sampling after it.

An engine's adapter says what a step computes (`ForwardBatch`), from the metadata that its scheduler has made. The rest
is the same for all engines: rows and phases, the tokens that are forced, what the cache holds at a request's end.
"""

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import pairwise
from typing import Any, Self

import torch
from torch import nn

from harness.engines.record import write_read_back
from harness.engines.torch_modules.paged_cache import BlockTables, CacheReader, PagedCache
from harness.engines.torch_modules.table import Argument, Binding, Entry, Value, bind, parts_of, unfit
from harness.errors import Code, HarnessError
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of a step, in the engine's order."""

    phase: str
    """`prefill`, `decode` or `mixed`."""
    request: Sequence[int]
    """Request id of each row."""
    position: Sequence[int]
    token_ids: Sequence[int] = ()
    """Tokens that were to be fed; compared with what the embedding gets, where the table says where that is."""
    sampled_rows: Sequence[int] = ()
    """Indices of the rows whose logits choose a token."""
    kept: Sequence[int] | None = None
    """Indices of the rows in the engine's tensors; None if these hold no others (padding)."""
    sampled_kept: Sequence[int] | None = None
    """Where the sampled rows are among those of modules that see only rows to sample from; None if there are no
    others (engines also compute the logits of a prompt's piece, and throw them away)."""
    paging: Mapping[str, Any] = field(default_factory=dict)
    """`slot_mapping` and `block_tables` as `RecordingWriter.begin_step` takes them."""


class ModuleRecorder:
    """Hooks the modules of a table while a step runs, and writes what they show."""

    def __init__(self, model: nn.Module, table: Sequence[Entry]) -> None:
        """Find the modules.

        Raises:
            HarnessError: BAD_MODULE_TABLE: the table does not fit the engine.
        """
        self._bindings, self._num_layers = bind(model, table)
        self._row_shapes: dict[str, torch.Size] = {}
        self._sampled_only = {tap for entry in table if entry.is_sampled_only for tap in entry.taps}

    def unsupported_taps(self, graph: Graph, others: Collection[str] = ()) -> tuple[str, ...]:
        """Return what neither the table nor `others` show: sites, or single taps where other layers show the site.

        Caches are left out.
        """
        shown = {graph.canonical(name) for name in (*self._names(lambda _tap: True), *others)}
        return graph.not_shown(shown)

    @contextmanager
    def step(self, writer: RecordingWriter, rows: StepRows) -> Iterator["StepRecorder"]:
        """Record the engine's one forward in the block; `writer.end_step` is the caller's.

        Raises:
            HarnessError: BAD_MODULE_TABLE: a value has other rows than the step; ENGINE_FAILED: other tokens were fed.
        """
        sampled = list(rows.sampled_rows)
        names = ["lm_head", *self._names(lambda tap: tap in self._sampled_only)]
        partial = dict.fromkeys(names, sampled)
        writer.begin_step(
            phase=rows.phase,
            request=rows.request,
            position=rows.position,
            sampled_rows=sampled,
            partial_rows=partial if sampled else None,
            **rows.paging,
        )
        recorder = StepRecorder(writer, rows, self._row_shapes)
        with ExitStack() as stack:
            calls = Counter[int]()
            for binding in self._bindings:
                for handle in self._hooks(binding, recorder, calls):
                    stack.callback(handle.remove)
            yield recorder

    def _hooks(self, binding: Binding, recorder: "StepRecorder", calls: Counter[int]) -> Iterator[Any]:
        entry, key = binding.entry, id(binding.module)

        def show(value: Value, tensors: Any) -> None:
            layer = self._layer(binding, calls[key])
            for template, tensor in parts_of(value, tensors, binding.path):
                name = self._name(template, layer)
                if name is not None:
                    recorder.tap(name, tensor, is_sampled_only=entry.is_sampled_only, where=binding.path)

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if entry.token_ids is not None:
                recorder.check_fed(_argument(binding, args, kwargs, entry.token_ids), binding.path)
            for place, value in entry.inputs.items():
                show(value, _argument(binding, args, kwargs, place))

        def after(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            for place, value in entry.updated.items():
                show(value, _argument(binding, args, kwargs, place))
            if entry.output is not None:
                show(entry.output, output)
            calls[key] += 1

        yield binding.module.register_forward_pre_hook(before, with_kwargs=True)
        yield binding.module.register_forward_hook(after, with_kwargs=True)

    def _layer(self, binding: Binding, call: int) -> int | None:
        if call >= len(binding.layers):
            what = "a module is called more often in a step than there are layers"
            raise unfit(what, binding.path, len(binding.layers), call + 1)
        return binding.layers[call]

    def _names(self, applies: Callable[[str], bool]) -> list[str]:
        """Return the names of the taps whose templates apply, in every layer."""
        named = (
            self._name(tap, layer)
            for binding in self._bindings
            for tap in binding.entry.taps
            if applies(tap)
            for layer in binding.layers
        )
        return list(dict.fromkeys(name for name in named if name is not None))

    def _name(self, template: str, layer: int | None) -> str | None:
        """Return the tap's name; None for the layer before the first."""
        if layer == 0 and "{previous}" in template:
            return None
        previous = None if layer is None else layer - 1
        return template.format(layer=layer, previous=previous, last=self._num_layers - 1)


class StepRecorder:
    """Writes the values of one step."""

    def __init__(
        self, writer: RecordingWriter, rows: StepRows, row_shapes: dict[str, torch.Size] | None = None
    ) -> None:
        """Record into the step that is open in `writer`; `row_shapes` are those of earlier steps, by tap."""
        self._writer, self._rows = writer, rows
        self._row_shapes = {} if row_shapes is None else row_shapes

    def tap(self, name: str, tensor: torch.Tensor, *, is_sampled_only: bool = False, where: str = "") -> None:
        """Write a value: [rows, ...], [requests, tokens, ...] or [rows x heads, size], or of the sampled rows only."""
        if is_sampled_only:
            if self._rows.sampled_rows:
                kept, num_rows = self._rows.sampled_kept, len(self._rows.sampled_rows)
                shown = tensor if kept is None else tensor[torch.tensor(list(kept), device=tensor.device)]
                self._write(name, self._flat(shown, num_rows, where or name))
            return
        kept = self._rows.kept
        if kept is None:
            self._write(name, self._flat(tensor, len(self._rows.request), where or name))
            return
        flat = tensor if len(tensor) > max(kept, default=-1) else tensor.flatten(0, 1)
        self._write(name, flat[torch.tensor(list(kept), device=flat.device)])

    def _write(self, name: str, rows: torch.Tensor) -> None:
        """Write rows in the shape that they had at first: [1, 1, size] is one row with a dimension more, or less."""
        row = self._row_shapes.setdefault(name, rows.shape[1:])
        self._writer.tap(name, rows.reshape(-1, *row) if rows.shape[1:].numel() == row.numel() else rows)

    def check_fed(self, token_ids: Any, where: str) -> None:
        """Compare the tokens that the embedding was given with the forced ones."""
        expected = list(self._rows.token_ids)
        if not expected or not isinstance(token_ids, torch.Tensor):
            return
        flat = token_ids.flatten()
        actual = (flat if self._rows.kept is None else flat[torch.tensor(list(self._rows.kept))]).tolist()
        if actual != expected:
            at = next((at for at, pair in enumerate(zip(actual, expected, strict=False)) if pair[0] != pair[1]), 0)
            raise HarnessError(
                Code.ENGINE_FAILED,
                "the engine was fed other tokens than those that are forced",
                where=f"{where}: row {at} of a step of {len(expected)}",
                expected=str(expected[at : at + 4]),
                actual=str(actual[at : at + 4]),
                hint="feed the tokens of the request, not those that the engine would have chosen",
            )

    @staticmethod
    def _flat(tensor: torch.Tensor, num_rows: int, where: str) -> torch.Tensor:
        if len(tensor) == num_rows:
            return tensor
        if tensor.dim() > 1 and tensor.shape[0] * tensor.shape[1] == num_rows:
            return tensor.flatten(0, 1)
        if tensor.dim() == 2 and num_rows and len(tensor) % num_rows == 0:  # [rows x heads, head size]
            return tensor.view(num_rows, -1, tensor.shape[1])
        raise unfit("a value has other rows than the step", where, f"[{num_rows}, ...]", list(tensor.shape))


def _argument(binding: Binding, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: Argument) -> Any:
    """Return what a module is given, however it is given: a name may also stand by its place in the signature."""
    if isinstance(place, str):
        if place in kwargs:
            return kwargs[place]
        names = list(inspect.signature(binding.module.forward).parameters)
        place_of_name = names.index(place) if place in names else len(args)
    else:
        place_of_name = place
    if place_of_name < len(args):
        return args[place_of_name]
    there = f"{len(args)} by place, and {', '.join(kwargs) or 'none by name'}"
    raise unfit(f"a module is not given the argument {place!r}", binding.path, repr(place), there)


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
    def read_batch(self, arguments: Mapping[str, Any]) -> ForwardBatch:
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

    def _begin(self, arguments: Mapping[str, Any]) -> None:
        batch = self.read_batch(arguments)
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
