"""Records the steps of a live engine from its modules."""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from harness.engines.torch_modules.table import Argument, Binding, Entry, bind
from harness.engines.torch_modules.values import Value, parts_of, unfit
from harness.errors import Code, HarnessError
from harness.formats.recording import RecordingWriter
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

        def show(value: Value, given: Any) -> None:
            layer = self._layer(binding, calls[key])
            for template, tensor in parts_of(value, given, binding.path):
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
        """Compare what the embedding was given with what was to be fed."""
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
