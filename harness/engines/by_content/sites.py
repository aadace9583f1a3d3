"""Places in an engine's run where a tensor is: what its modules return, and the results of its operators.

A place has the same name in every step, however many tokens the step has, so that a tensor that was found there once is
read there again.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

MODULE, RETURNED = "module", "returned"
"""What a site of a module's result, and that of a step's result, have in place of an operator."""
_NOT_THE_ENGINE = ("/torch/", "/harness/engines/by_content/")
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
    """Field of what is returned."""

    @property
    def name(self) -> str:
        """All fields as one name."""
        return f"{self.path}, call {self.call}: {self.what} {self.line} {self.repeat} {self.place}"

    def elsewhere(self, layer: int, other: int) -> Iterator["Site"]:
        """Yield the sites that may be to another layer what this is to its own: another module, or another call."""
        parts = self.path.split(".")
        shifted = [str(other) if part == str(layer) else part for part in parts]
        if shifted != parts:
            yield replace(self, path=".".join(shifted))
        if self.path:
            yield replace(self, call=self.call + other - layer)

    def __str__(self) -> str:
        where = f"{self.path or 'the step'}{f', call {self.call + 1}' if self.call else ''}"
        if self.what in (MODULE, RETURNED):
            return where + (f", field {self.place + 1}" if self.place else "")
        name = self.what.removeprefix("aten.").rpartition(".")[0] or self.what
        return f"{where}: {name}" + (f", result {self.place + 1}" if self.place else "")


See = Callable[[Site, torch.Tensor], None]
"""Is shown each tensor while it has its value: what is kept must be copied."""


class SiteWatcher:
    """Shows the tensors of the steps that run in the block.

    Views are left out: what they are of was shown. Tensors that an operator writes into are shown after it.
    """

    def __init__(self, names: Mapping[nn.Module, str], see: See, *, only: Collection[Site] | None = None) -> None:
        """Watch modules.

        Args:
            names: paths of the engine's modules; any other module has the name of its class.
            see: is shown what is there.
            only: the sites to show; None for all.
        """
        self._names, self._see = names, see
        self._only = None if only is None else frozenset(only)
        self._wanted = None if only is None else {(site.path, site.what) for site in only}
        self._stack = ExitStack()
        self._path: list[_Running] = [_Running("", 0)]
        self._calls = Counter[str]()

    def __enter__(self) -> Self:
        self._stack.callback(torch_module.register_module_forward_pre_hook(self._begin).remove)
        self._stack.callback(torch_module.register_module_forward_hook(self._end).remove)
        if self._wanted is None or any(what not in (MODULE, RETURNED) for _path, what in self._wanted):
            self._stack.enter_context(_Mode(self))
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def returned(self, value: Any) -> None:
        """Show what the step returns."""
        for place, tensor in enumerate(_tensors(value)):
            self._show(Site("", 0, RETURNED, place=place), tensor)

    def _begin(self, module: nn.Module, _args: Any) -> None:
        path = self._names.get(module) or type(module).__name__
        self._path.append(_Running(path, self._calls[path]))
        self._calls[path] += 1

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        running = self._path.pop()
        for place, tensor in enumerate(_tensors(output)):
            self._show(Site(running.path, running.call, MODULE, place=place), tensor)

    def operated(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Show the result of an operator, and what it has written into."""
        running, what = self._path[-1], str(operator)
        if self._wanted is not None and (running.path, what) not in self._wanted:
            return
        tensors = [*_made(operator, result), *_written(operator, args, kwargs)]
        if not tensors:
            return
        line = _line()
        repeat = running.repeats[what, line]
        running.repeats[what, line] += 1
        for place, tensor in enumerate(tensors):
            self._show(Site(running.path, running.call, what, line, repeat, place), tensor)

    def _show(self, site: Site, tensor: torch.Tensor) -> None:
        if self._only is None or site in self._only:
            with _disable_current_modes():
                self._see(site, tensor.detach())


class _Running:
    """A call of a module."""

    def __init__(self, path: str, call: int) -> None:
        self.path, self.call = path, call
        self.repeats = Counter[tuple[str, str]]()


class _Mode(TorchDispatchMode):
    def __init__(self, watcher: SiteWatcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._watcher.operated(func, args, kwargs or {}, result)
        return result


def _made(operator: Any, result: Any) -> Iterator[torch.Tensor]:
    """Yield the results that are tensors of their own."""
    returns = operator._schema.returns
    if not returns:
        return
    results = result if isinstance(result, tuple | list) else (result,)
    declared = returns if len(returns) == len(results) else returns * len(results)  # a list is declared once
    for value, item in zip(results, declared, strict=True):
        if item.alias_info is None:
            yield from _tensors(value)


def _written(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operator writes into, by its schema."""
    for place, declared in enumerate(operator._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            yield from _tensors(args[place] if place < len(args) else kwargs.get(declared.name))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Go through the tensors of numbers in what is returned."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
        elif value.is_complex():  # rotary of pairs; what it is viewed as later is no tensor of its own
            yield torch.view_as_real(value.resolve_conj()).flatten(-2)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


def _line() -> str:
    """Return the line of the engine's code that is being run."""
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        name = frame.f_code.co_filename
        if not any(part in name for part in _NOT_THE_ENGINE):
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
