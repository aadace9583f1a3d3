"""A model's parts in turn: the weights of each are there while it runs, or all of them where memory is free."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from harness.base.memory import available_bytes
from harness.oracle.untraced import UntracedModel


@contextmanager
def all_parts_held(hf: UntracedModel) -> Iterator[None]:
    """Read the weights of each part when it begins to run and drop them when it ends."""
    with ExitStack() as stack:
        for path in hf.parts:
            running = ExitStack()
            module = hf.module(path)
            stack.enter_context(running)

            def before(_module: nn.Module, _args: Any, path: str = path, running: ExitStack = running) -> None:
                running.enter_context(hf.weights.held(path))

            def after(_module: nn.Module, _args: Any, _output: Any, running: ExitStack = running) -> None:
                running.close()

            stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        yield


@contextmanager
def parts_kept(hf: UntracedModel) -> Iterator[None]:
    """Keep the weights of all parts for a block that runs the model often, if they take at most half of what is free.

    Else each forward reads them anew.
    """
    with ExitStack() as stack:
        for path in hf.parts if keeps_parts(hf) else ():
            stack.enter_context(hf.weights.held(path))
        yield


def keeps_parts(hf: UntracedModel) -> bool:
    """Whether `parts_kept` keeps the weights of a model."""
    num_bytes = sum(parameter.numel() * hf.dtype.itemsize for parameter in hf.model.parameters())
    return bool(2 * num_bytes <= _free_bytes(hf.device))


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()
