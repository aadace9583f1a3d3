"""Inputs of products that a quantised checkpoint declares to be quantised.

`R` rows, `I` inputs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from harness.oracle.model import HFModel


def has_declared_inputs(hf: HFModel) -> bool:
    """Whether a checkpoint declares that inputs of products are quantised."""
    source = hf.quantised_source
    return source is not None and source.open().has_declared_inputs


def rounded_inputs(hf: HFModel, module: str, x: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield inputs [R, I] float64 of a module's product in each way that the checkpoint allows, the likeliest first."""
    source = hf.quantised_source
    if source is not None:
        for way in source.open().input_ways(module, x.shape[1], dtype):
            yield way(x.to(torch.float32))


@contextmanager
def inputs_as_declared(hf: HFModel, dtype: torch.dtype) -> Iterator[None]:
    """Let HuggingFace's linear modules read inputs as their checkpoint declares them, the likeliest way.

    Hooks on a module are shown its inputs as they were.
    """
    source = hf.quantised_source
    if source is None:
        yield
        return
    checkpoint = source.open()
    with ExitStack() as stack:
        for path, module in hf.model.named_modules():
            is_linear = isinstance(module, nn.Linear)
            way = next(checkpoint.input_ways(path, module.in_features, dtype), None) if is_linear else None
            if way is not None:
                stack.callback(module.__dict__.pop, "forward", None)
                module.forward = _quantising(way, module.forward)
        yield


def _quantising(way: Callable[[torch.Tensor], torch.Tensor], forward: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda x: forward(way(x.flatten(0, -2)).view(x.shape).to(x.dtype))
