"""Changes of a whole model's precision: of its weights, of the inputs of its products, of its keys and values."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from harness.judge.explain.core.formats import (
    FLOAT8_DTYPES,
    HALF_DTYPES,
    Change,
    int8,
    name_of,
    of_inputs,
    of_weights,
    rounded,
)
from harness.judge.explain.core.rerun import replaced
from harness.judge.explain.edits.change import Make, ModelChange, all_made, likely_change
from harness.oracle.model import HFModel
from harness.oracle.watch import AttentionCall, Seeing, run_attention, watching

_LEAVES = 0.1
"""Keys in float16 left 0.012, another format than the right one 0.2 and more."""
_ALIKE = 4.0
"""Times by which the error of logits may differ from what that of a weight lets expect."""
_SAMPLE_ROWS = 256


def changes_of_precision(
    hf: HFModel, dtype: torch.dtype, times: Callable[[ModelChange], float | None], *, of_held: bool
) -> Iterator[ModelChange]:
    """Yield coarser formats of all weights, of these and of the inputs of products, and of the keys and values.

    Args:
        hf: the model.
        dtype: of the engine, which is none of the formats.
        times: tells how many times larger the engine's error is than what a change makes; None if that does not run.
        of_held: whether weights may be changed.
    """
    changed = partial(likely_change, leaves=_LEAVES)
    for name, change in _of_keys(dtype):
        yield changed(f"keys and values are kept in {name}", partial(_with_keys, hf, change))
    products = [module for module in hf.model.modules() if isinstance(module, nn.Linear)]
    known = partial(int8, dims=(1,))
    ratio = times(likely_change("", _of_weights(products, known))) if products and of_held else None
    if ratio is None:
        return
    sample = products[0].weight[:_SAMPLE_ROWS].double()
    error = ratio * _error(known, sample)
    width = math.gcd(*(module.in_features for module in products))
    formats = [item for item in of_weights(width) if error / _ALIKE <= _error(item[1], sample) <= error * _ALIKE]
    for where, modules in _sites(hf, products).items():
        for name, change in formats:
            cause, make = f"the weights of {where} are kept {name}", _of_weights(modules, change)
            yield changed(cause, make)
            for of_input, start, change_of_input in of_inputs():
                if name.startswith(start):
                    whole = partial(all_made, [make, partial(_with_inputs, products, change_of_input)])
                    yield changed(f"{cause}, and inputs of products are quantised to {of_input}", whole)
    for coarser in HALF_DTYPES:
        if f"in {name_of(coarser)}" in dict(formats):
            change = partial(rounded, dtype=coarser)
            make = partial(all_made, [partial(_with_values, parameter, change) for parameter in hf.model.parameters()])
            yield changed(f"the weights of all modules are kept in {name_of(coarser)}", make)


def _error(change: Change, weight: torch.Tensor) -> float:
    return float((change(weight) - weight).norm() / weight.norm())


def _sites(hf: HFModel, products: Sequence[nn.Linear]) -> Mapping[str, Sequence[nn.Module]]:
    """Return the modules whose weights are kept in one format, by what they are."""
    head = hf.model.get_output_embeddings()
    embeddings = [module for module in hf.model.modules() if isinstance(module, nn.Embedding)]
    return {
        "all products and the embedding": [*products, *embeddings],
        "all products": products,
        "all products but the head": [module for module in products if module is not head],
    }


def _of_keys(dtype: torch.dtype) -> Iterator[tuple[str, Change]]:
    for coarser in (*HALF_DTYPES, *FLOAT8_DTYPES):
        if coarser != dtype:
            yield name_of(coarser), partial(rounded, dtype=coarser)
    yield "int8, with one scale for each token and head", partial(int8, dims=(-1,))


def _changed(change: Change, x: torch.Tensor) -> torch.Tensor:
    return change(x.double()).to(x)


def _of_weights(modules: Sequence[nn.Module], change: Change) -> Make:
    return partial(all_made, [partial(_with_weight, module, change) for module in modules])


def _with_weight(module: nn.Module, change: Change, _factor: float) -> AbstractContextManager[None]:
    values = module.weight
    assert isinstance(values, torch.Tensor)
    # another parameter: this one may be tied to that of another module, which keeps it
    return replaced(module, "weight", nn.Parameter(_changed(change, values), requires_grad=False))


def _with_values(parameter: nn.Parameter, change: Change, _factor: float) -> AbstractContextManager[None]:
    return replaced(parameter, "data", _changed(change, parameter.data))


@contextmanager
def _with_inputs(products: Sequence[nn.Linear], change: Change, _factor: float) -> Iterator[None]:
    def quantise(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        x = args[0]
        return (_changed(change, x.flatten(0, -2)).view_as(x),)

    with ExitStack() as stack:
        for module in products:
            stack.callback(module.register_forward_pre_hook(quantise).remove)
        yield


@contextmanager
def _with_keys(hf: HFModel, change: Change, _factor: float) -> Iterator[None]:
    with watching(hf) as watch, watch.showing(_CoarseKeys(change)):
        yield


class _CoarseKeys(Seeing):
    """Rounds the keys and values that attention reads."""

    def __init__(self, change: Change) -> None:
        super().__init__(lambda _source, _value: None)
        self._change = change

    def attend(self, call: AttentionCall, function: Callable[..., Any]) -> Any:
        """See `Watcher.attend`."""
        key, value = (_changed(self._change, x) for x in (call.key, call.value))
        return run_attention(replace(call, key=key, value=value), function)
