"""A model's parts in turn: the weights of each are there while it runs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

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
