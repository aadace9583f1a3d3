"""Where two copies of a model part: the first module, in the order of the run, whose work differs in any bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleEvent:
    """A module is entered, or returns."""

    path: str
    is_entry: bool
    author: str
    """Whose work the values are: results are the module's own, arguments are its caller's."""
    values: dict[str | None, Tensors]
    """Arguments or results, copied, by the module that returned them; None where they were computed in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """The first difference of two runs."""

    path: str
    """The module whose work differs."""
    size: float
    """The largest relative difference of a row, as a ratio of Euclidean norms; infinite where shapes differ."""


@torch.no_grad()
def trace(model: nn.Module, ids: torch.Tensor) -> list[ModuleEvent]:
    """Run a model over ids [1, T] without a cache; return what each module was given and what it returned."""
    events: list[ModuleEvent] = []
    running: list[str] = []
    returned: dict[int, tuple[str, torch.Tensor]] = {}  # by id; the tensor is held, so that its id stays its own

    def copies(arguments: Any) -> dict[str | None, Tensors]:
        values: dict[str | None, Tensors] = {}
        for tensor in tensors_in(arguments):
            maker, _ = returned.get(id(tensor), (None, tensor))
            values.setdefault(maker, []).append(tensor.detach().clone())
        return values

    def enter(path: str, arguments: Any) -> None:
        author = running[-1] if running else ""
        events.append(ModuleEvent(path=path, is_entry=True, author=author, values=copies(arguments)))
        running.append(path)

    def leave(path: str, results: Any) -> None:
        running.pop()
        events.append(ModuleEvent(path=path, is_entry=False, author=path, values=copies(results)))
        returned.update({id(tensor): (path, tensor) for tensor in tensors_in(results)})

    with hooked(model, enter, leave):
        model(input_ids=ids, use_cache=False)
    return events


def tensors_in(values: Any) -> Tensors:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@contextmanager
def hooked(model: nn.Module, enter: Callable[[str, Any], None], leave: Callable[[str, Any], None]) -> Iterator[None]:
    """Call `enter` with each module's path and arguments, and `leave` with its path and results."""
    handles = []
    for path, module in model.named_modules():

        def before(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            enter(path, (args, kwargs))

        def after(module: nn.Module, args: Any, results: Any, path: str = path) -> None:
            leave(path, results)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_difference(
    sound: list[ModuleEvent], faulty: list[ModuleEvent], *, aside_from: str | None = None
) -> ValueDifference | None:
    """Return the first module whose work differs, or None if nothing does.

    With `aside_from`, what that module returned is taken as given: the first one is returned that uses it.
    """
    for sound_event, faulty_event in zip(sound, faulty, strict=False):
        if sound_event.path != faulty_event.path or sound_event.is_entry != faulty_event.is_entry:
            return ValueDifference(path=sound_event.author, size=torch.inf)
        if not sound_event.is_entry and sound_event.path == aside_from:
            continue
        size = distance(values_but(sound_event, aside_from), values_but(faulty_event, aside_from))
        if size > 0:
            return ValueDifference(path=sound_event.author, size=size)
    return None


def values_but(event: ModuleEvent, maker: str | None) -> Tensors:
    """Return an event's values but for those that a module returned."""
    kept = [values for made_by, values in event.values.items() if maker is None or made_by != maker]
    return [value for values in kept for value in values]


def distance(actual: Tensors, expected: Tensors) -> float:
    """Return the largest relative difference of a row of any tensor."""
    if [value.shape for value in actual] != [value.shape for value in expected]:
        return torch.inf
    return max((row_distance(*pair) for pair in zip(actual, expected, strict=True)), default=0.0)


def row_distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if torch.equal(actual, expected):
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = torch.atleast_1d(actual.to(wide)), torch.atleast_1d(expected.to(wide))
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)).max())


def innermost_called(path: str, events: list[ModuleEvent]) -> str:
    """Return a path, or that of the innermost module around it which is called: some modules only hold a weight."""
    called = {event.path for event in events}
    while path and path not in called:
        path = path.rpartition(".")[0]
    return path
