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
        yield from source.open().rounded_inputs(module, x, dtype)


@contextmanager
def inputs_as_declared(hf: HFModel, dtype: torch.dtype) -> Iterator[None]:
    """Let HuggingFace's linear modules read inputs as their checkpoint declares them, the likeliest way.

    Hooks on a module are shown its inputs as they were.
    """
    with ExitStack() as stack:
        for path, module in hf.model.named_modules():
            if isinstance(module, nn.Linear) and has_declared_inputs(hf):
                stack.callback(module.__dict__.pop, "forward", None)
                module.forward = _quantising(hf, path, dtype, module.forward)  # type: ignore[method-assign]
        yield


def _quantising(hf: HFModel, path: str, dtype: torch.dtype, forward: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def run(x: torch.Tensor) -> torch.Tensor:
        rounded = next(rounded_inputs(hf, path, x.flatten(0, -2), dtype), None)
        return forward(x if rounded is None else rounded.view(x.shape).to(x.dtype))

    return run
