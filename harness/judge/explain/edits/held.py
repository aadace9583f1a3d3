"""Changes of what modules hold: a parameter that is another's, in another order or format; a module that is left out.

No code speaks of weights, and no parameter is known here by its name.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from harness.formats.taps import Kind
from harness.judge.explain.core.formats import FLOAT8_DTYPES, HALF_DTYPES, name_of, rounded
from harness.judge.explain.core.rerun import replaced
from harness.judge.explain.core.wrong_operation import WrongOperation
from harness.judge.explain.edits.change import LIKELY, POSSIBLE, ModelChange, ToldChange

_MAX_ELEMENTS = 1 << 26
"""Of a parameter that is changed."""
_MAX_OTHERS = 32
"""Modules whose parameters are tried in the place of those of one, the nearest first."""
_LOGARITHM = "_log"
"""End of the names of parameters whose exponential is computed with."""
_Change = Callable[[torch.Tensor], torch.Tensor]
_Held = Mapping[str, torch.Tensor]
"""Parameters and buffers of a module, by name."""


def changes_of_parameters(wrong: WrongOperation, paths: list[str]) -> Iterator[ModelChange]:
    """Yield the changes of what the modules around an operation hold, the innermost first."""
    path = paths[0]
    if not isinstance(wrong.hf.module(path), nn.Linear):
        what = "the norm is skipped" if "norm" in path.rpartition(".")[2] else f"{path} is skipped: it gives its input"
        skip = partial(_changed, wrong.hf.module(path), "forward", lambda x, *_args, **_kwargs: x)
        yield ModelChange(module=path, rank=LIKELY, make=skip, tell=partial(_told, what))
    for path in paths:
        module = wrong.hf.module(path)
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        held = {name: x for name, x in tensors if x.is_floating_point() and x.numel() <= _MAX_ELEMENTS}
        for name, parameter in held.items():
            yield from _of_parameter(wrong, path, name, parameter)
        yield from _of_others(wrong, path, held)


def _changed(holder: Any, name: str, value: Any, _factor: float) -> AbstractContextManager[None]:
    return replaced(holder, name, value)


def _of_parameter(wrong: WrongOperation, path: str, name: str, parameter: torch.Tensor) -> Iterator[ModelChange]:
    tried: list[tuple[int, str, _Change]] = [
        (LIKELY, "is zero: left out, or not loaded", torch.zeros_like),
        (LIKELY, "is all one: not applied", torch.ones_like),
        (LIKELY, "is squared: applied twice", torch.square),
        (LIKELY, "is added twice" if name == "bias" else "is doubled", lambda x: 2 * x),
        (LIKELY, "has the wrong sign", torch.neg),
        (LIKELY, "is applied as 1 + weight", lambda x: x + 1),
        (LIKELY, "is applied less one", lambda x: x - 1),
        *((LIKELY, how, change) for how, change in _in_another_order(parameter.shape)),
    ]
    coarse = (*FLOAT8_DTYPES, *(HALF_DTYPES if wrong.dtype not in HALF_DTYPES else ()))
    tried += [(POSSIBLE, f"is rounded to {name_of(dtype)}", partial(rounded, dtype=dtype)) for dtype in coarse]
    for rank, how, change in tried:
        make, tell = partial(_with, parameter, change), partial(_told, f"{name} of {path} {how}")
        yield ModelChange(module=path, rank=rank, make=make, tell=tell)
    numbers = {f"{name} of {path} is scaled by": _scaled}
    if name.endswith(_LOGARITHM):
        numbers[f"the exponential of {name} of {path} is scaled by"] = _shifted
    for how, scaled in numbers.items():
        tell = partial(_told_number, how)
        yield ModelChange(module=path, rank=LIKELY, make=partial(scaled, parameter), tell=tell, is_fitted=True)


def _with(parameter: torch.Tensor, change: _Change, _factor: float) -> AbstractContextManager[None]:
    return replaced(parameter, "data", change(parameter.data))


def _told(cause: str, _factor: float) -> ToldChange:
    return ToldChange(cause=cause)


def _told_number(cause: str, factor: float) -> ToldChange:
    return ToldChange(cause=f"{cause} {factor:.4g}")


def _scaled(parameter: torch.Tensor, factor: float) -> AbstractContextManager[None]:
    return replaced(parameter, "data", parameter.data * factor)


def _shifted(parameter: torch.Tensor, factor: float) -> AbstractContextManager[None]:
    return replaced(parameter, "data", parameter.data + torch.tensor(factor, dtype=torch.float64).log())


def _in_another_order(shape: torch.Size) -> Iterator[tuple[str, _Change]]:
    if len(shape) == 2 and shape[0] == shape[1]:
        yield "is transposed", torch.t
    dims = [(0, "rows"), (2, "kernel taps")] if _is_depthwise(shape) else [(0, "rows"), (1, "columns")]
    for dim, which in dims[: len(shape)]:
        orders = {f"has its {which} in another order: reversed": torch.arange(shape[dim]).flip(0)}
        if not shape[dim] % 2:
            first, second = torch.arange(shape[dim]).chunk(2)
            orders |= {
                f"has its halves of the {which} exchanged": torch.cat((second, first)),
                f"has the first half of its {which} twice": torch.cat((first, first)),
                f"has its halves of the {which} interleaved": torch.stack((first, second), 1).flatten(),
                f"has every second one of its {which} first": torch.arange(shape[dim]).view(-1, 2).T.flatten(),
            }
        for shift in (1, -1):
            orders[f"has its {which} in another order: shifted by {shift}"] = torch.arange(shape[dim]).roll(shift)
        for how, order in orders.items():
            yield how, partial(_ordered, dim, order)


def _is_depthwise(shape: torch.Size) -> bool:
    """Whether a parameter is the kernel of a convolution that reads each channel by itself."""
    return len(shape) == 3 and shape[1] == 1


def _ordered(dim: int, order: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.index_select(dim, order.to(x.device))


def _of_others(wrong: WrongOperation, path: str, held: _Held) -> Iterator[ModelChange]:
    """Yield all parameters, and each alone, as those of the same name and shape of other modules, the nearest first."""
    like = dict[str, list[str]]()
    for source in _sources(wrong, path):
        shapes = {name: getattr(getattr(wrong.module_at(source), name, None), "shape", None) for name in held}
        like[source] = [name for name, x in held.items() if shapes[name] == x.shape]
    for source, names in [(source, names) for source, names in like.items() if names][:_MAX_OTHERS]:
        told = {f"{name} of {path} is that of {source}": [name] for name in names} if len(held) > 1 else {}
        if len(names) == len(held):
            is_tied = any(op.kind is Kind.EMBEDDING and op.module == source for op in wrong.graph)
            told[f"{'tied to the embedding: ' if is_tied else ''}the weights are those of {source}"] = names
        for cause, those in told.items():
            make = partial(_with_those_of, wrong, source, {name: held[name] for name in those})
            yield ModelChange(module=path, rank=LIKELY, make=make, tell=partial(_told, cause))


@contextmanager
def _with_those_of(wrong: WrongOperation, source: str, held: _Held, _factor: float) -> Iterator[None]:
    with wrong.hf.weights.held(wrong.hf.part_of(source)):
        values = {name: getattr(wrong.module_at(source), name).detach().to(x, copy=True) for name, x in held.items()}
    with ExitStack() as stack:
        for name, x in held.items():
            stack.enter_context(replaced(x, "data", values[name]))
        yield


def _sources(wrong: WrongOperation, path: str) -> list[str]:
    """Return the other modules of the part, the same of other layers, and all others, the nearest first."""
    part, site = wrong.hf.part_of(path), path.removeprefix(wrong.hf.part_of(path))
    inside = [f"{part}.{inner}" for inner, _ in wrong.hf.module(part).named_modules() if inner]
    modules = dict.fromkeys(op.module for op in wrong.graph if op.module)
    parts = dict.fromkeys(wrong.hf.part_of(module) for module in modules)
    near = sorted((item for item in parts if item != part), key=lambda item: _distance(item, part))
    others = sorted(modules, key=lambda module: _distance(wrong.hf.part_of(module), part))
    return [item for item in dict.fromkeys((*inside, *(f"{item}{site}" for item in near), *others)) if item != path]


def _distance(first: str, second: str) -> int:
    numbers = [int("".join(filter(str.isdigit, item)) or 0) for item in (first, second)]
    return abs(numbers[0] - numbers[1])
