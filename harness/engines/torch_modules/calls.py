"""How an engine's modules are called, seen in one forward: which of HF's values they can show follows from it.

A class's name does not say it: a norm returns its result, or that and the residual that it has updated; a module is
there for its weights and is never called. Only shapes are kept, and whether a field is handed through: no value is
compared with HF's, so no wrong value can take a tap out of a check. What is not shown flows through HF's own modules,
and is judged at the next tap after it.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn

Shape = tuple[int, ...] | None
"""Of a tensor; None for what is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """Shapes of what a module was given and returned."""

    places: tuple[Shape, ...]
    """Arguments by place."""
    names: Mapping[str, Shape]
    """All arguments by name."""
    outputs: tuple[Shape, ...]
    """What it returned: the fields of a tuple, or the one value. None, too, for a field after the first that is an
    argument as it was given: a residual that is handed through, and has not been added."""

    @property
    def is_single(self) -> bool:
        """Whether it returned one tensor of its own."""
        return all(shape is None for shape in self.outputs[1:])

    def given(self, place: int | str) -> Shape:
        """Return the shape of an argument; None if there is none."""
        if isinstance(place, str):
            return self.names.get(place)
        return self.places[place] if place < len(self.places) else None


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of a forward's modules."""

    num_rows: int
    """Tokens of the forward."""
    by_path: Mapping[str, ModuleCall]
    """Of modules that were called once."""

    def to_json(self) -> dict[str, Any]:
        """Return the calls as what JSON can hold, for another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the calls of `to_json`."""
        return cls(data["num_rows"], {path: ModuleCall(**call) for path, call in data["by_path"].items()})

    def holds(self, shape: Shape, row: tuple[int, ...]) -> bool:
        """Whether a tensor has a row of that shape, in any layout of its elements, for each token of the forward."""
        if shape is None or not shape:
            return False
        num_elements = self.num_rows * torch.Size(row).numel()
        rows_first = shape[0] % self.num_rows == 0 or tuple(shape[:2]) == (1, self.num_rows)
        return rows_first and torch.Size(shape).numel() == num_elements


@contextmanager
def watched_calls(model: nn.Module, *, num_rows: int) -> Iterator[list[Calls]]:
    """Watch the one forward of so many tokens that the block runs; the list gets its calls at the block's end."""
    seen: dict[str, list[ModuleCall]] = {}
    found: list[Calls] = []
    with ExitStack() as stack:
        for path, module in model.named_modules():
            given: list[torch.Tensor] = []
            before, after = partial(_keep, given), partial(_note, seen.setdefault(path, []), given)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        yield found
    found.append(Calls(num_rows, {path: calls[0] for path, calls in seen.items() if len(calls) == 1}))


def _keep(given: list[torch.Tensor], _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Keep a module's arguments as they are before the call, which may change them in place."""
    given[:] = [value.clone() for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def _note(
    calls: list[ModuleCall],
    given: list[torch.Tensor],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: Any,
) -> None:
    first, *others = output if isinstance(output, tuple | list) and output else (output,)
    others = [None if any(_is_same(value, item) for item in given) else value for value in others]
    by_place = dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
    calls.append(
        ModuleCall(
            places=tuple(map(_shape, args)),
            names={name: _shape(value) for name, value in {**by_place, **kwargs}.items()},
            outputs=tuple(map(_shape, (first, *others))),
        )
    )
    given.clear()


def _is_same(value: Any, given: torch.Tensor) -> bool:
    """Whether a value is what was given; zeros do not tell, since zeros may have been added."""
    is_tensor = isinstance(value, torch.Tensor) and value.dtype == given.dtype
    return is_tensor and bool(value.any()) and torch.equal(value, given)


def _shape(value: Any) -> Shape:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
