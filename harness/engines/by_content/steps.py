"""Steps of an engine with all tensors that it computes: what its modules return, and the results of its operators.

The place of a tensor has the same name in every step, however many tokens the step has, so a tensor that was found
there once is read there again.
"""

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from harness.errors import Code, HarnessError

MODULE, RETURNED, ARGUMENTS = "module", "returned", "arguments"
"""What the sites of a module's result, a step's result and a module's arguments have in place of an operator."""
_ARGUMENT = -1
"""Place of an operator's argument."""
_FACTOR = {"aten.mm.default": 0, "aten.addmm.default": 1, "aten.linear.default": 0}
"""Index of the argument that is multiplied by weights. It is shown if it was written into since it was shown."""
_UNINITIALISED = ("aten.empty", "aten.new_empty")
"""Operators whose result is memory that was freed: it may hold a copy of any value. What is written there is shown."""
_NOT_THE_ENGINE = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}")
"""Folders of torch and of this room: an engine's folder may be called `torch`, too."""
_MOST_FRAMES = 40


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a step of an engine."""

    path: str
    """The innermost module that runs; empty outside of all modules."""
    call: int
    """Calls of that module earlier in the step."""
    what: str
    """`module` for what the module returns, `returned` for what the step does, or the operator: `aten.mul.Tensor`."""
    line: str = ""
    """Of the engine's code that calls the operator: `path/to/file.py:12`."""
    repeat: int = 0
    """Tensors of the same operator and line earlier in the module's call."""
    place: int = 0
    """Field of what is returned; -1 for the argument of a product."""

    @property
    def name(self) -> str:
        """All fields as one name."""
        return f"{self.path}, call {self.call}: {self.what} {self.line} {self.repeat} {self.place}"

    def elsewhere(self, layer: int, other_layer: int) -> Iterator["Site"]:
        """Yield the sites that may be to another layer what this is to its own: another module, or another call."""
        parts = self.path.split(".")
        shifted = [str(other_layer) if part == str(layer) else part for part in parts]
        if shifted != parts:
            yield replace(self, path=".".join(shifted))
        if self.path:
            yield replace(self, call=self.call + other_layer - layer)

    def __str__(self) -> str:
        where = f"{self.path or 'the step'}{f', call {self.call + 1}' if self.call else ''}"
        if self.what in (MODULE, RETURNED):
            return where + (f", field {self.place + 1}" if self.place else "")
        name = self.what.removeprefix("aten.").rpartition(".")[0] or self.what
        field = f", result {self.place + 1}" if self.place > 0 else ", argument" if self.place == _ARGUMENT else ""
        return f"{where}: {name}{field}"


@dataclass(frozen=True, slots=True)
class Lookup:
    """A place where an engine makes vectors of token ids."""

    path: str
    """Of the module; empty outside of all modules."""
    what: str
    """`arguments` for those of the module, or the operator."""
    line: str = ""
    place: int = 0
    """Of the ids among the tensors of integers."""

    @property
    def of_module(self) -> "Lookup":
        """The arguments of the same module."""
        return Lookup(self.path, ARGUMENTS)


See = Callable[[Site, torch.Tensor], None]
"""Is shown each tensor while it has its value: what is kept must be copied."""
OnIds = Callable[[Lookup, torch.Tensor, bool], See | None]
"""Is shown a copy of integers that a module or an operator is given, and whether that makes numbers of them.

Where a forward begins, it may return what is shown the tensors of this forward.
"""


class SiteWatcher:
    """Shows the tensors of the steps that run in the block.

    Views are left out: what they are of was shown. Tensors that an operator writes into are shown after it. A tensor is
    of the forward whose tensors it is computed from: forwards may take turns, in one thread or in several.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        see: See,
        *,
        only: Collection[Site] | None = None,
        lookups: Collection[Lookup] | None = (),
        on_ids: OnIds | None = None,
    ) -> None:
        """Watch modules.

        Args:
            names: paths of the engine's modules; any other module has the name of its class.
            see: is shown what is there.
            only: the sites to show; None for all.
            lookups: the places at each of which a forward begins, from which calls are counted; None to show the
                integers of all places, and to count from the beginning of the step.
            on_ids: is shown the integers at these places.
        """
        self._names, self._on_ids = names, on_ids
        self._only = None if only is None else frozenset(only)
        self._lookups = None if lookups is None else frozenset(lookups)
        places = None if lookups is None else {(lookup.path, lookup.what) for lookup in lookups}
        self._lookup_places = places
        self._wanted = None if only is None or places is None else places | {(site.path, site.what) for site in only}
        self._sees_operators = self._wanted is None or any(
            what not in (MODULE, RETURNED, ARGUMENTS) for _path, what in self._wanted
        )
        self._fresh: dict[int, tuple[int, int, int]] = {}
        """Version, size and width of results that were shown, by their address."""
        self._stack = ExitStack()
        self.is_over = False
        """Whether the block has ended: a thread may run on."""
        self._latest = self._first = _Forward(see)
        self._made: WeakKeyDictionary[torch.UntypedStorage, _Forward] = WeakKeyDictionary()
        """Forwards of the tensors that were made in them."""
        self._written: WeakKeyDictionary[torch.UntypedStorage, _Forward] = WeakKeyDictionary()
        """Forwards that have written into memory that none of them has made."""
        self._lock, self._thread = threading.Lock(), threading.local()
        self._thread.path = [_Running("", 0, self._latest)]

    def __enter__(self) -> Self:
        self._stack.callback(torch_module.register_module_forward_pre_hook(self._begin).remove)
        self._stack.callback(torch_module.register_module_forward_hook(self._end, always_call=True).remove)
        if self._sees_operators:
            self._stack.enter_context(_Mode(self))
        return self

    def __exit__(self, *_error: object) -> None:
        self.is_over = True
        self._stack.close()

    def returned(self, value: Any) -> None:
        """Show what the step returns."""
        with _disable_current_modes():
            for place, tensor in enumerate(_tensors(value)):
                self._show(Site("", 0, RETURNED, place=place), tensor, self._first)

    @property
    def _path(self) -> "list[_Running]":
        """The modules that run in this thread."""
        if not hasattr(self._thread, "path"):
            self._thread.path, self._thread.mode = [_Running("", 0, self._latest)], ExitStack()
        path: list[_Running] = self._thread.path
        return path

    def _begin(self, module: nn.Module, args: Any) -> None:
        path, running = self._names.get(module) or type(module).__name__, self._path
        if len(running) == 1 and hasattr(self._thread, "mode") and self._sees_operators:
            self._thread.mode.enter_context(_Mode(self))  # a dispatch mode is of one thread
        forward = self._forward_of(args) or running[-1].forward
        running.append(_Running(path, forward.calls[path], forward))
        forward.calls[path] += 1
        self._look_up(path, ARGUMENTS, args)

    def _look_up(self, path: str, what: str, arguments: Any, line: str = "", *, makes_numbers: bool = False) -> None:
        """Show integers among the arguments; begin a forward if it is one of the look-ups."""
        if self._on_ids is None or (self._lookup_places is not None and (path, what) not in self._lookup_places):
            return
        for place, ids in enumerate(_integers(arguments)):
            lookup = Lookup(path, what, line, place)
            if self._lookups is not None and lookup not in self._lookups:
                continue
            with _disable_current_modes(), self._lock:
                see = self._on_ids(lookup, ids.detach().to("cpu", copy=True), makes_numbers)
            if self._lookups is not None:
                self._begin_forward(_Forward(see or self._first.see, self._latest.number + 1))

    def begin_again(self) -> None:
        """Count calls from here on: a step begins."""
        self._made.clear()
        self._written.clear()
        self._begin_forward(self._first)

    def _begin_forward(self, forward: "_Forward") -> None:
        """Count calls from here on, in what runs in this thread."""
        self._latest = forward
        forward.calls.clear()
        forward.repeats.clear()
        for running in self._path:
            running.call, running.forward = 0, forward
            forward.calls[running.path] = 1

    def _forward_of(self, arguments: Any) -> "_Forward | None":
        """Return the forward of what an operator or a module is given; None if only one has begun, or it is not known.

        Of several, the one that began last: it may read what is kept of others, or join them.
        """
        if self._latest.number < 2:
            return None
        storages = [tensor.untyped_storage() for tensor in _tensors(arguments)]
        for known in (self._made, self._written):
            forwards = [forward for storage in storages if (forward := known.get(storage)) is not None]
            if forwards:
                return max(forwards, key=lambda forward: forward.number)
        return None

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        running = self._path.pop()
        forward = self._forward_of(output) or running.forward
        with _disable_current_modes():
            for place, tensor in enumerate(_tensors(output)):
                self._made.setdefault(tensor.untyped_storage(), forward)
                self._show(Site(running.path, running.call, MODULE, place=place), tensor, forward)
        if len(self._path) == 1 and hasattr(self._thread, "mode"):
            self._thread.mode.close()

    def operated(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Show the result of an operator, and what it has written into."""
        running, schema = self._path[-1], _schema_of(operator)
        what = schema.name
        if not schema.changes:
            return
        made, written = [*_made(schema, result)], [*_written(schema, args, kwargs)]
        is_wanted = self._wanted is None or (running.path, what) in self._wanted
        line = _line() if is_wanted and (made or written) else ""
        forward = self._forward_of((args, kwargs))
        if is_wanted:
            self._look_up(running.path, what, (args, kwargs), line, makes_numbers=bool(made))
        forward = forward or running.forward
        self._made.update((tensor.untyped_storage(), forward) for tensor in made)
        self._written.update((tensor.untyped_storage(), forward) for tensor in written)
        if not is_wanted or not (made or written):
            return
        repeat = forward.repeats[running, what, line]
        forward.repeats[running, what, line] += 1
        if what in _FACTOR and self._is_changed(args[_FACTOR[what]]):
            self._show(Site(running.path, running.call, what, line, repeat, _ARGUMENT), args[_FACTOR[what]], forward)
        for place, tensor in enumerate([*made, *written]):
            self._show(Site(running.path, running.call, what, line, repeat, place), tensor, forward)
        if self._only is None:
            self._fresh |= {tensor.data_ptr(): _version(tensor) for tensor in made}

    def _is_changed(self, factor: torch.Tensor) -> bool:
        """Whether a tensor has another content than the result that was shown: a slice of it was written into.

        Or other rows: heads that were folded into the tokens, or a context that few tokens take another operator for.
        """
        version = _version(factor)
        return version[0] < 0 or self._fresh.get(factor.data_ptr()) != version

    def _show(self, site: Site, tensor: torch.Tensor, forward: "_Forward") -> None:
        if self._only is None or site in self._only:
            forward.see(site, tensor.detach())


class _Forward:
    """What runs from one look-up of token ids on."""

    def __init__(self, see: See, number: int = 0) -> None:
        self.see, self.number = see, number
        self.calls = Counter[str]()
        self.repeats = Counter[tuple[_Running, str, str]]()


class _Running:
    """A call of a module."""

    def __init__(self, path: str, call: int, forward: _Forward) -> None:
        self.path, self.call, self.forward = path, call, forward


class _Mode(TorchDispatchMode):
    def __init__(self, watcher: SiteWatcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._watcher.is_over:
            self._watcher.operated(func, args, kwargs or {}, result)
        return result


class _Schema(NamedTuple):
    """What an operator declares."""

    name: str
    is_new: tuple[bool, ...]
    """Of each result, whether it is a tensor of its own, and no view."""
    written: tuple[tuple[int, str], ...]
    """Place and name of the arguments that it writes into."""

    @property
    def changes(self) -> bool:
        """Whether it makes or changes a tensor: most operators are views."""
        return any(self.is_new) or bool(self.written)


@cache
def _schema_of(operator: Any) -> _Schema:
    schema = operator._schema
    written = (
        (place, declared.name)
        for place, declared in enumerate(schema.arguments)
        if declared.alias_info is not None and declared.alias_info.is_write
    )
    is_empty = str(operator).startswith(_UNINITIALISED)
    is_new = () if is_empty else tuple(item.alias_info is None for item in schema.returns)
    return _Schema(str(operator), is_new, tuple(written))


def _made(schema: _Schema, result: Any) -> Iterator[torch.Tensor]:
    """Yield the results that are tensors of their own."""
    if not schema.is_new:
        return
    results = result if isinstance(result, tuple | list) else (result,)
    is_new = schema.is_new if len(schema.is_new) == len(results) else schema.is_new * len(results)  # a list: once
    for value, is_tensor in zip(results, is_new, strict=True):
        if is_tensor:
            yield from _tensors(value)


def _written(schema: _Schema, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operator writes into."""
    for place, name in schema.written:
        yield from _tensors(args[place] if place < len(args) else kwargs.get(name))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Go through the tensors of numbers in what is returned. Float8 holds codes, whose scale is elsewhere."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.itemsize > 1:
            yield value
        elif value.is_complex():  # rotary of pairs; what it is viewed as later is no tensor of its own
            yield torch.view_as_real(value.resolve_conj()).flatten(-2)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


def _integers(value: Any) -> Iterator[torch.Tensor]:
    """Go through the tensors of integers in what something is given."""
    if isinstance(value, torch.Tensor):
        if value.dtype in (torch.int64, torch.int32) and value.numel():
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, Mapping):
        yield from _integers(list(value.values()))


def _version(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return a number that grows with each write into a tensor, or -1 if it has none, its size, and that of a row."""
    return -1 if tensor.is_inference() else tensor._version, tensor.numel(), tensor.shape[-1] if tensor.dim() else 1


def _line() -> str:
    """Return the line of the engine's code that is being run."""
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        name = frame.f_code.co_filename
        if _is_of_the_engine(name):
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


@cache
def _is_of_the_engine(file: str) -> bool:
    return not file.startswith(_NOT_THE_ENGINE)


_DEPTH = 3
"""Attributes of attributes of attributes, in which the engine's modules are looked for."""

Work = Sequence[tuple[int, list[int], int]]
"""What a step computes: of each request its number, token ids, and the position of the first of them."""


class Stepper(Protocol):
    """A live engine: any object that computes steps."""

    # An object whose steps compute all earlier tokens of a request again has an attribute `recomputes`, which is true.
    # One that forgets what it holds from a request's first position on, where that is not the next one, has an
    # attribute `rewinds`, which is true. If it returns the logits of all tokens besides, it can verify drafts.
    # One that has a cache of prefixes has a method `begin(request, token_ids)`: see `StepEngine`.
    # One that runs layers that predict further tokens has an attribute `tokens_ahead`, the number of these layers.

    def step(self, work: Work) -> torch.Tensor:
        """Compute the tokens, and return the logits of each request's last one, [requests, vocabulary].

        Or those of all tokens, [tokens, vocabulary].
        """


def module_paths(stepper: object) -> dict[nn.Module, str]:
    """Return the modules of an engine, found in its attributes, with their paths."""
    paths: dict[nn.Module, str] = {}
    level: list[tuple[str, Any]] = [("", stepper)]
    for _ in range(_DEPTH + 1):
        following: list[tuple[str, Any]] = []
        for prefix, value in level:
            if isinstance(value, nn.Module):
                for path, module in value.named_modules():
                    paths.setdefault(module, path)
            elif hasattr(value, "__dict__"):
                following += [(f"{prefix}{name}.", var) for name, var in vars(value).items()]
        level = following
    return paths


class Watching(Protocol):
    """Shows the tensors of the steps that run in the block."""

    def __enter__(self) -> "Watching":
        """Begin."""

    def __exit__(self, *error: object) -> None:
        """End."""

    def returned(self, value: torch.Tensor) -> None:
        """Show what the step returns."""


def watching(
    stepper: Stepper,
    see: See,
    *,
    only: Collection[Site] | None = None,
    lookups: Collection[Lookup] | None = (),
    on_ids: OnIds | None = None,
) -> Watching:
    """Watch an engine: see `SiteWatcher`. If its tensors are not torch's, it has a method `watching(see, only)`."""
    watch: Callable[..., Watching] | None = getattr(stepper, "watching", None)
    if watch is not None:
        return watch(see, only)
    return SiteWatcher(module_paths(stepper), see, only=only, lookups=lookups, on_ids=on_ids)


def with_following(stepper: Stepper, work: Work, following: Sequence[Sequence[int]] = ()) -> Any:
    """Return work as an engine takes it: an engine with MTP layers also gets the tokens that follow."""
    ahead = tokens_ahead(stepper)
    if not ahead:
        return work
    known = [list(tokens[:ahead]) for tokens in following] or [[] for _ in work]
    return [(*item, tokens) for item, tokens in zip(work, known, strict=True)]


def tokens_ahead(stepper: Stepper) -> int:
    """Return how many tokens an engine predicts beside the next one."""
    return int(getattr(stepper, "tokens_ahead", 0))


def watched_run(
    stepper: Stepper,
    work: Work,
    see: See | None,
    *,
    only: Collection[Site] | None = None,
    rows: Sequence[int] | None = None,
    following: Sequence[Sequence[int]] = (),
    lookups: Collection[Lookup] | None = (),
    on_ids: OnIds | None = None,
) -> torch.Tensor:
    """Run a step while its tensors are shown; return its logits, [requests, vocabulary].

    Args:
        stepper: the engine.
        work: of the step.
        see: shown the tensors; None attaches nothing to the engine.
        only: the sites to show; None for all.
        rows: tokens of the step whose logits are returned, [rows, vocabulary]; None: the last one of each request.
        following: of each request the tokens that come next.
        lookups: places at each of which a forward begins; see `SiteWatcher`.
        on_ids: shown the token ids there.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: it returned no logits, or not one row for each request; or not one for each
            token where `rows` are asked for.
    """
    ends = [*accumulate(len(tokens) for _, tokens, _ in work)]
    with torch.no_grad(), ExitStack() as stack:
        watch = None
        if see is not None:
            watch = stack.enter_context(watching(stepper, see, only=only, lookups=lookups, on_ids=on_ids))
        logits = stepper.step(with_following(stepper, work, following))
        is_tensor = isinstance(logits, torch.Tensor) and logits.is_floating_point() and logits.dim() > 0
        num_rows = logits.numel() // max(1, logits.shape[-1]) if is_tensor else 0
        if not is_tensor or num_rows not in ((ends[-1],) if rows is not None else (len(work), ends[-1])):
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                f"the engine's step returns no row of logits for each {'request' if rows is None else 'token'}",
                where=f"{type(stepper).__name__}.step",
                expected=f"a tensor [{len(work) if rows is None else ends[-1]}, vocabulary]",
                actual=list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__,
                hint="return the logits of the last token of each request, in the order of the work; drafts are "
                "verified by those of all tokens",
            )
        returned = logits.detach().reshape(num_rows, -1)
        if num_rows == ends[-1]:
            returned = returned[[end - 1 for end in ends] if rows is None else list(rows)]
        if watch is not None:
            watch.returned(returned)
    return returned


def finish(stepper: Stepper, number: int) -> None:
    """Let an engine free what it keeps of a request that has ended."""
    getattr(stepper, "finish", lambda _number: None)(number)


def rewinds(stepper: Stepper) -> bool:
    """Whether an engine goes back where a request's first position is one that it has computed."""
    return bool(getattr(stepper, "rewinds", False))


def recomputes(stepper: Stepper) -> bool:
    """Whether each step of an engine computes all earlier tokens of its request again."""
    return bool(getattr(stepper, "recomputes", False))
