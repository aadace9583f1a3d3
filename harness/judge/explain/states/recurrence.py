"""HF's own mixer of one layer, run again over recorded rows: for operations that carry a state from row to row.

A state-space or linear-attention layer reads its inputs at all earlier rows. So the rows of a request are run through
HF's module once more, with what was recorded put in the place of its inner values, and with one thing changed.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from harness.formats.taps import KINDS, Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.explain.core.failure import Failure, gathered
from harness.judge.explain.experts.mixture import exactly
from harness.oracle.caches import MIXER_CACHES, new_cache

_SAME = 1e-4
"""Relative distance within which the module, run again, gives what it should."""
Sequences = Sequence[Rows]
_Row = tuple[int, int]
"""(request, position)."""
Convolved = dict[tuple[int, _Row], torch.Tensor]
"""[C] that a convolution gives at a row, by the number of the convolution in the order of the run."""


class _SeenError(Exception):
    """Ends a run where the operation was seen."""


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """A mixer and the rows of the requests that it is run over."""

    failure: Failure
    path: str
    """Of the mixer."""
    entry: str
    """Tap that the mixer reads."""
    histories: tuple[Rows, ...]
    """Every request's rows from its first to its last wrong one."""

    @property
    def module(self) -> nn.Module:
        """HF's mixer."""
        return self.failure.hf.module(self.path)

    def run(
        self, sequences: Sequences | None = None, *, convolved: Convolved | None = None, seen: Convolved | None = None
    ) -> torch.Tensor | None:
        """Return what the operation gives at the failure's rows, [R, W] float64, if rows follow each other as given.

        Args:
            sequences: of rows, each begun with an empty state; those of every request in order by default. A row that
                is there twice counts where it is last. None is returned where a row was not recorded.
            convolved: what the convolutions of the mixer give at each row, in the place of what they would give.
            seen: is given what they gave.
        """
        found: dict[_Row, torch.Tensor] = {}
        for rows in self.histories if sequences is None else sequences:
            values = self._values(rows)
            if values is None:
                return None
            with exactly(self.failure), _Convolutions(rows.places(), convolved, seen):
                output = self._run_one(values, rows.position)
            found |= dict(zip(rows.places(), output, strict=True))
        wanted = self.failure.rows.places()
        return torch.stack([found[row] for row in wanted]) if found.keys() >= set(wanted) else None

    def run_by_steps(self, kept: Callable[[str, torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        """Return what the operation gives if the state goes through `kept` after each step: [R, W] float64.

        Args:
            kept: from `conv` or `recurrent`, and a state, to what is kept of it.

        None where a row was not recorded, or the mixer keeps its state otherwise than HF's cache does.
        """
        found: dict[_Row, torch.Tensor] = {}
        for rows in self.histories:
            cache = new_cache(self.failure.hf)
            if cache is None:
                return None
            layer = cache.layers[self.module.layer_idx]
            for step in rows.step.unique_consecutive().tolist():
                own = rows.select((rows.step == step).nonzero()[:, 0])
                values = self._values(own)
                if values is None:
                    return None
                with exactly(self.failure):
                    found |= dict(zip(own.places(), self._run_one(values, own.position, cache), strict=True))
                for name in ("conv", "recurrent"):
                    for state in getattr(layer, f"{name}_states", {}).values():
                        if state is not None:
                            state.copy_(kept(name, state))
        wanted = self.failure.rows.places()
        return torch.stack([found[row] for row in wanted]) if found.keys() >= set(wanted) else None

    def convolved(self) -> Convolved:
        """Return what the mixer's convolutions give at each row; empty without any.

        A row that is there twice counts where it is last.
        """
        seen: Convolved = {}
        self.run(seen=seen)
        return seen

    def _values(self, rows: Rows) -> dict[str, torch.Tensor] | None:
        """Return what was recorded of the mixer's input and of the operation's inputs at some rows, by tap."""
        taps = (self.entry, *self.failure.operation.inputs)
        found = {tap: gathered(self.failure.locator, tap, rows) for tap in taps}
        complete = {tap: value for tap, value in found.items() if value is not None}
        return complete if len(complete) == len(found) else None

    def _run_one(self, values: dict[str, torch.Tensor], positions: torch.Tensor, cache: Any = None) -> torch.Tensor:
        hf, graph, seen = self.failure.hf, self.failure.graph, list[torch.Tensor]()
        with ExitStack() as stack:
            for tap in self.failure.operation.inputs:
                source = graph[tap].source
                stack.enter_context(_forced(hf.module(graph[tap].module), source, values[tap].to(hf.device)))
            stack.enter_context(_shown(self.failure.module, self.failure.operation.source, seen))
            with suppress(_SeenError):
                given = _arguments(self.module, positions.to(hf.device), cache)
                self.module(values[self.entry][None].to(hf.device), **given)
        return seen[0].to("cpu", torch.float64).reshape(len(values[self.entry]), -1)


def recurrence_of(failure: Failure) -> Recurrence | None:
    """Return the mixer behind an operation; None if it has none that gives what it should on the recorded rows."""
    path = _mixer_of(failure)
    if path is None:
        return None
    first = _first_of(failure, path)
    if first is None:
        return None
    last: dict[int, int] = {}
    for request, position in failure.rows.places():
        last[request] = max(position, last.get(request, 0))
    histories = tuple(history(failure, request, count + 1) for request, count in last.items())
    found = Recurrence(failure=failure, path=path, entry=first.inputs[0], histories=histories)
    try:
        output = found.run()
    except Exception:  # a module of HF's that needs more than its rows: nothing is known of it
        return None
    if output is None or output.shape != failure.expected.shape:
        return None
    if bool(((output - failure.expected).norm(dim=1) > _SAME * failure.expected.norm(dim=1)).any()):
        return None
    return found


def history(failure: Failure, request: int, count: int) -> Rows:
    """Return the first rows of a request, each in the step that computed it last."""
    position = torch.arange(count)
    rows = Rows(request=torch.full_like(position, request), position=position, step=torch.zeros_like(position))
    found = failure.locator.find(failure.operation.inputs[0], rows)
    return Rows(request=rows.request, position=position, step=found[:, 0])


def _mixer_of(failure: Failure) -> str | None:
    """Return the innermost module around the operation with parameters that no other operation shows.

    None if there is none, or attention stands in it.
    """
    shown = {op.module for op in failure.graph if op.kind in (Kind.LINEAR, Kind.NORM)}
    path = failure.operation.module
    while path:
        module = failure.module_at(path)
        own = {f"{path}.{name}".rstrip(".") for name, inner in module.named_modules() if inner._parameters}
        if not isinstance(module, nn.Linear) and len(list(module.children())) > 1 and own - shown:
            return None if any(KINDS[op.kind].has_heads for op in _inside(failure, path)) else path
        path = path.rpartition(".")[0]
    return None


def _inside(failure: Failure, path: str) -> list[Operation]:
    return [op for op in failure.graph if op.source and f"{op.module}.".startswith(f"{path}.")]


def _first_of(failure: Failure, path: str) -> Operation | None:
    """Return the first operation of a mixer: one that reads what the mixer reads."""
    inside = _inside(failure, path)
    return inside[0] if inside and len(inside[0].inputs) == 1 else None


def _arguments(module: nn.Module, positions: torch.Tensor, cache: Any) -> dict[str, Any]:
    """Return what a mixer asks for besides its rows: their positions, no mask, and the state of before, if any."""
    known = {"position_ids": positions[None], "attention_mask": None, "use_cache": cache is not None}
    if cache is not None:
        known |= dict.fromkeys(MIXER_CACHES, cache)
    asked = inspect.signature(module.forward).parameters
    return {name: value for name, value in known.items() if name in asked}


class _Convolutions(TorchFunctionMode):
    """Sees what convolutions over the rows of a sequence give, or puts something else in its place."""

    def __init__(self, rows: list[_Row], given: Convolved | None, seen: Convolved | None) -> None:
        super().__init__()
        self._rows, self._given, self._seen, self._num_calls = rows, given, seen, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is not torch.conv1d or output.shape[-1] < len(self._rows):
            return output
        call, self._num_calls = self._num_calls, self._num_calls + 1
        if self._given is not None:
            rows = enumerate(self._rows)  # what another request left behind is not among the rows that were given
            given = torch.stack([self._given.get((call, row), output[0, :, at]) for at, row in rows], dim=-1)
            output = torch.cat((given[None].to(output), output[..., len(self._rows) :]), dim=-1)
        if self._seen is not None:
            self._seen |= {(call, row): output[0, :, at].clone() for at, row in enumerate(self._rows)}
        return output


def _forced(module: nn.Module, source: str, value: torch.Tensor) -> RemovableHandle:
    """Put recorded rows [T, W] in the place of a module's output, or of its input, for all that hold the tensor."""
    if source.endswith(":input"):
        return module.register_forward_pre_hook(lambda _module, args: _put(value, args[0]))
    return module.register_forward_hook(lambda _module, _args, output: _put(value, output))


def _put(value: torch.Tensor, own: Any) -> None:
    own.copy_(value.reshape(own.shape))


def _shown(module: nn.Module, source: str, seen: list[torch.Tensor]) -> RemovableHandle:
    """Keep what the operation gives, and end the run there."""

    def before(_module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0].clone())
        raise _SeenError

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).clone())
        raise _SeenError

    is_input = source.endswith(":input")
    return module.register_forward_pre_hook(before) if is_input else module.register_forward_hook(after)
