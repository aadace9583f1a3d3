"""Changes of a whole model: of a setting, of the code of a class, of what the modules at one site hold."""

import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import nn

from harness.base.memory import available_bytes
from harness.judge.explain.core.rerun import replaced
from harness.judge.explain.core.wrong_operation import WrongOperation
from harness.judge.explain.edits.change import LIKELY, Make, ModelChange, ToldChange, all_made, likely_change
from harness.judge.explain.edits.code import LinesRun, changes_of_classes
from harness.judge.explain.edits.held import changes_of_parameters
from harness.judge.explain.edits.precision import changes_of_precision
from harness.oracle.model import HFModel

_EPS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)
_THETAS = (5e3, 1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
"""What configs of the families in transformers have."""
_NAMES_OF_EPS = ("eps", "variance_epsilon", "epsilon")
_ROTARY = "apply_rotary_pos_emb"
"""Name in transformers of what rotates queries and keys."""
_LAYER = re.compile(r"\.\d+(?=\.)")


def changes_of_model(
    wrong: WrongOperation, lines: LinesRun, times: Callable[[ModelChange], float | None]
) -> list[tuple[int, ModelChange]]:
    """Return the changes of a model, the likely ones first, with a number for how much.

    What is done in all layers comes before the same in one, and what has no number to fit before what has one.

    Args:
        wrong: the logits.
        lines: of HF's code that ran.
        times: see `changes_of_precision`.
    """
    is_held = are_weights_held(wrong.hf)  # what is read for each run has no value to change
    exchanges, of_sites = (
        _by_reach(items if is_held else iter(())) for items in (_exchanges(wrong.hf), _of_sites(wrong))
    )
    of_code = sorted(changes_of_classes(wrong.hf.model, lines), key=lambda change: change.rank)
    likely = [change for change in of_code if change.rank == LIKELY]
    precision = list(changes_of_precision(wrong.hf, wrong.dtype, times, of_held=is_held))
    groups = (
        [*_settings(wrong.hf), *_rotations(wrong.hf), *likely], precision, *exchanges, *of_sites, of_code[len(likely) :]
    )  # fmt: skip
    return [
        (2 * number + change.is_fitted, change)
        for number, group in enumerate(groups)
        for change in sorted(group, key=lambda change: change.is_fitted)
    ]


def are_weights_held(hf: HFModel) -> bool:
    """Whether the model's weights are in memory between its runs, and there is room for others in their place."""
    weights = list(hf.model.parameters())
    num_bytes = sum(weight.nbytes for weight in weights if weight.device.type == "cpu")
    return not any(weight.is_meta for weight in weights) and num_bytes < available_bytes()


def _by_reach(changes: Iterator[ModelChange]) -> tuple[list[ModelChange], list[ModelChange]]:
    """Return the changes in all layers, and those in one."""
    everything = list(changes)
    return [item for item in everything if not item.module], [item for item in everything if item.module]


def _settings(hf: HFModel) -> Iterator[ModelChange]:
    """Yield other values of two settings that modules keep in a form that no line of code shows."""
    held = [(module, name) for module in hf.model.modules() for name in _NAMES_OF_EPS]
    eps = [(module, name) for module, name in held if isinstance(getattr(module, name, None), float)]
    for value in _EPS if eps else ():
        yield likely_change(f"eps of all norms is {value:g}", partial(_attributes, eps, value))
    rope = getattr(hf.config, "rope_parameters", None) or {}
    theta, kind = rope.get("rope_theta"), rope.get("rope_type", "default")
    tables = [module for module in hf.model.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)]
    if isinstance(theta, float | int) and theta > 1 and kind == "default":
        for value in _THETAS:
            if value != theta:
                power = math.log(value) / math.log(theta)
                yield likely_change(f"rotary theta is {value:g} instead of {theta:g}", partial(_powers, tables, power))


def _rotations(hf: HFModel) -> Iterator[ModelChange]:
    """Yield rotary over the other pairs of a head's elements: products of queries and keys keep an order of both."""
    places = {type(module).__module__: None for module in hf.model.modules()}
    holders = [sys.modules[name] for name in places if hasattr(sys.modules.get(name), _ROTARY)]
    neighbours, halves = "neighbouring pairs (interleaved)", "half-split pairs"
    for shape, actual, expected in (((-1, 2), neighbours, halves), ((2, -1), halves, neighbours)):
        makes = [partial(_rotated, holder, shape) for holder in holders]
        if makes:
            yield likely_change(f"rotary over {actual} instead of {expected}", partial(all_made, makes))


@contextmanager
def _rotated(holder: Any, shape: tuple[int, int], _factor: float) -> Iterator[None]:
    rotate = getattr(holder, _ROTARY)

    def rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, *rest: Any, **options: Any) -> Any:
        size = cos.shape[-1]
        order = torch.arange(size, device=q.device).view(shape).T.flatten()
        ordered = (torch.cat((x[..., :size][..., order], x[..., size:]), dim=-1) for x in (q, k))
        return rotate(*ordered, cos, *rest, **options)

    with replaced(holder, _ROTARY, rotated):
        yield


def _exchanges(hf: HFModel) -> Iterator[ModelChange]:
    """Yield the exchange of the weights of two modules of a layer, in all layers and in each."""
    pairs = defaultdict[tuple[str, str], list[Make]](list)
    for path in hf.parts:
        modules = {name: module for name, module in hf.module(path).named_modules() if name and _weight(module)}
        for (first, one), (second, another) in combinations(modules.items(), 2):
            if _weight(one) == _weight(another):
                make = partial(_exchanged, one, another)
                pairs[first, second].append(make)
                yield likely_change(f"the weights of {first} and {second} of {path} are exchanged", make, module=path)
    for (first, second), makes in pairs.items():
        if len(makes) > 1:
            yield likely_change(
                f"the weights of {first} and {second} are exchanged, in all layers", partial(all_made, makes)
            )


def _of_sites(wrong: WrongOperation) -> Iterator[ModelChange]:
    """Yield changes of parameters of the modules at one site, in all layers and in each."""
    sites = defaultdict[str, list[ModelChange]](list)
    for path, module in wrong.hf.model.named_modules():
        if not path or not any(True for _ in module.parameters(recurse=False)):
            continue
        for change in changes_of_parameters(wrong, [path]):
            sites[_LAYER.sub("", change.tell(1.0).cause)].append(change)
            if _LAYER.search(path):
                yield change
            else:
                yield replace(change, module="")
    num_layers = sum(1 for path in wrong.hf.parts if path.rpartition(".")[2].isdecimal())
    for changes in sites.values():
        if 1 < len(changes) == num_layers:
            first = changes[0]
            yield replace(
                first,
                module="",
                make=partial(all_made, [change.make for change in changes]),
                tell=partial(_told, first),
            )


def _told(first: ModelChange, factor: float) -> ToldChange:
    told = first.tell(factor)
    return replace(told, cause=f"{told.cause}, and likewise in all layers")


def _weight(module: nn.Module) -> torch.Size | None:
    weight = getattr(module, "weight", None)
    return weight.shape if isinstance(weight, torch.Tensor) else None


@contextmanager
def _exchanged(one: nn.Module, another: nn.Module, _factor: float) -> Iterator[None]:
    first, second = one.weight, another.weight
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    values = first.data, second.data
    with replaced(first, "data", values[1]), replaced(second, "data", values[0]):
        yield


@contextmanager
def _attributes(places: Sequence[tuple[nn.Module, str]], value: float, _factor: float) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name in places:
            stack.enter_context(replaced(module, name, value))
        yield


@contextmanager
def _powers(tables: Sequence[nn.Module], power: float, _factor: float) -> Iterator[None]:
    """Give rotary tables the frequencies of another theta: `theta ** -x` to a power."""
    with ExitStack() as stack:
        for module in tables:
            table = module.inv_freq
            assert isinstance(table, torch.Tensor)
            stack.enter_context(replaced(table, "data", (table.data.double() ** power).to(table)))
        yield
