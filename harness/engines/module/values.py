"""Inputs and outputs of modules, shown while a user's model runs."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

INPUT = "input"

Sink = Callable[[str, tuple[torch.Tensor, ...]], None]


@contextmanager
def showing_values(module: nn.Module, paths: Collection[str], sink: Sink) -> Iterator[None]:
    """Show what the modules at some paths are called with and return.

    Args:
        module: what is run in the block.
        paths: of modules in it.
        sink: called with `PATH:input` or `PATH` and all tensors of floating-point numbers that there are; the second
            time in one block that a module is called, with `PATH:input@2` and `PATH@2`. It must copy what it keeps.
    """
    num_calls = Counter[str]()

    def show(name: str, values: Any) -> None:
        num_calls[name] += 1
        number = num_calls[name]
        sink(name if number == 1 else f"{name}@{number}", tuple(_tensors(values)))

    with ExitStack() as stack:
        for path in paths:
            own = module.get_submodule(path)
            stack.callback(own.register_forward_pre_hook(_before(path, show), with_kwargs=True).remove)
            stack.callback(own.register_forward_hook(_after(path, show)).remove)
        yield


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run a module as in inference, without dropout, and put the mode of each part of it back."""
    modes = [(item, item.training) for item in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for item, mode in modes:
            item.training = mode


def _before(path: str, show: Callable[[str, Any], None]) -> Callable[..., None]:
    return lambda _module, args, kwargs: show(f"{path}:{INPUT}", (*args, *kwargs.values()))


def _after(path: str, show: Callable[[str, Any], None]) -> Callable[..., None]:
    return lambda _module, _args, output: show(path, output)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Go through the tensors of floating-point numbers in what a module takes or returns."""
    if isinstance(values, torch.Tensor):
        if values.is_floating_point():
            yield values.detach()
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
