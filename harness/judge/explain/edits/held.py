"""Changes of what modules hold: a parameter that is another's, in another order or format; a module that is left out.

No code speaks of weights, and no parameter is known here by its name.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from harness.judge.explain.core.formats import HALF_DTYPES, name_of, rounded
from harness.judge.explain.core.rerun import replaced
from harness.judge.explain.core.wrong_operation import WrongOperation
from harness.judge.explain.edits.change import LIKELY, POSSIBLE, ModelChange, ToldChange

_MAX_ELEMENTS = 1 << 24
"""Of a parameter that is changed."""
_MAX_OTHERS = 8
"""Other modules whose parameter is tried, the nearest first."""
_LOGARITHM = "_log"
"""End of the names of parameters whose exponential is computed with."""


def changes_of_parameters(wrong: WrongOperation, paths: list[str]) -> Iterator[ModelChange]:
    """Yield the changes of what the modules around an operation hold, the innermost first."""
    for path in paths:
        module = wrong.hf.module(path)
        for name, parameter in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if parameter.is_floating_point() and parameter.numel() <= _MAX_ELEMENTS:
                yield from _of_parameter(wrong, path, name, parameter)
    path = paths[0]
    if not isinstance(wrong.hf.module(path), nn.Linear):
        what = "the norm is skipped" if "norm" in path.rpartition(".")[2] else f"{path} is skipped: it gives its input"
        skip = partial(_changed, wrong.hf.module(path), "forward", lambda x, *_args, **_kwargs: x)
        yield ModelChange(module=path, rank=LIKELY, make=skip, tell=lambda _: ToldChange(cause=what))


def _changed(holder: Any, name: str, value: Any, _factor: float) -> AbstractContextManager[None]:
    return replaced(holder, name, value)


def _of_parameter(wrong: WrongOperation, path: str, name: str, parameter: torch.Tensor) -> Iterator[ModelChange]:
    right, label = parameter.data, f"{name} of {path}"
    tried = [(LIKELY, "is zero: left out, or not loaded", torch.zeros_like(right))]
    tried += [(LIKELY, f"is that of {source}", values) for source, values in _of_others(wrong, path, name, right)]
    tried += list(_in_another_order(right))
    tried += [(LIKELY, "has the wrong sign", -right)]
    tried += [(LIKELY, "is applied as 1 + weight", right + 1), (LIKELY, "is applied less one", right - 1)]
    tried += [(LIKELY, "is all one: not applied", torch.ones_like(right)), (LIKELY, "is squared", right.square())]
    if wrong.dtype not in HALF_DTYPES:
        tried += [(POSSIBLE, f"is rounded to {name_of(dtype)}", rounded(right, dtype)) for dtype in HALF_DTYPES]
    for rank, how, values in tried:
        if not torch.equal(values, right):
            make = partial(_changed, parameter, "data", values)
            yield ModelChange(module=path, rank=rank, make=make, tell=partial(_told, f"{label} {how}"))
    numbers = {f"{label} is scaled by": _scaled}
    if name.endswith(_LOGARITHM):
        numbers[f"the exponential of {label} is scaled by"] = _shifted
    for how, scaled in numbers.items():
        tell = partial(_told_number, how)
        yield ModelChange(module=path, rank=LIKELY, make=partial(scaled, parameter), tell=tell, is_fitted=True)


def _told(cause: str, _factor: float) -> ToldChange:
    return ToldChange(cause=cause)


def _told_number(cause: str, factor: float) -> ToldChange:
    return ToldChange(cause=f"{cause} {factor:.4g}")


def _scaled(parameter: torch.Tensor, factor: float) -> AbstractContextManager[None]:
    return replaced(parameter, "data", parameter.data * factor)


def _shifted(parameter: torch.Tensor, factor: float) -> AbstractContextManager[None]:
    return replaced(parameter, "data", parameter.data + torch.tensor(factor, dtype=torch.float64).log())


def _in_another_order(right: torch.Tensor) -> Iterator[tuple[int, str, torch.Tensor]]:
    if right.dim() == 2 and right.shape[0] == right.shape[1]:
        yield LIKELY, "is transposed", right.T
    for dim, which in list(enumerate(("rows", "columns")))[: right.dim()]:
        if not right.shape[dim] % 2:
            first, second = right.chunk(2, dim)
            yield LIKELY, f"has its halves of the {which} exchanged", torch.cat((second, first), dim)
            yield LIKELY, f"has the first half of its {which} twice", torch.cat((first, first), dim)
            merged = torch.stack((first, second), dim + 1).flatten(dim, dim + 1)
            yield LIKELY, f"has its halves of the {which} interleaved", merged
            every = torch.arange(right.shape[dim], device=right.device).view(-1, 2).T.flatten()
            yield LIKELY, f"has every second one of its {which} first", right.index_select(dim, every)
        yield LIKELY, f"has its {which} in another order: reversed", right.flip(dim)
        yield LIKELY, f"has its {which} in another order: shifted by 1", right.roll(1, dim)
        yield LIKELY, f"has its {which} in another order: shifted by -1", right.roll(-1, dim)


def _of_others(wrong: WrongOperation, path: str, name: str, right: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of the same name and shape of other modules: of the layer, or of the same in others."""
    part, site = wrong.hf.part_of(path), path.removeprefix(wrong.hf.part_of(path))
    inside = [f"{part}.{inner}" for inner, _ in wrong.hf.module(part).named_modules() if inner]
    layers = dict.fromkeys(wrong.hf.part_of(op.module) for op in wrong.graph if op.layer is not None and op.module)
    near = sorted((item for item in layers if item != part), key=lambda item: _distance(item, part))
    for source in [*(item for item in inside if item != path), *(f"{item}{site}" for item in near)][: 4 * _MAX_OTHERS]:
        with wrong.hf.weights.held(wrong.hf.part_of(source)):
            values = getattr(wrong.module_at(source), name, None)
            if isinstance(values, torch.Tensor) and values.shape == right.shape:
                yield source, values.detach().to(right)


def _distance(first: str, second: str) -> int:
    numbers = [int("".join(filter(str.isdigit, item)) or 0) for item in (first, second)]
    return abs(numbers[0] - numbers[1])
