"""Putting a fault in and taking it out again."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves


@dataclass(slots=True)
class InjectedFault:
    """The number of times that the changed code ran: a fault that was never reached proves nothing."""

    num_calls: int = 0


Change = tuple[object, str, Callable[..., Any]]
"""An owner, the name of its function, and what is called in the place of that: `fault(original, *args)`."""


@contextmanager
def replaced(*changes: Change) -> Iterator[InjectedFault]:
    """Call other functions in the place of some, until the block ends."""
    planted = InjectedFault()
    with ExitStack() as stack:
        for owner, name, fault in changes:
            original = getattr(owner, name)
            _refuse_other_parameters(name, original, fault)
            stack.enter_context(patch.object(owner, name, _counted(original, fault, planted)))
        yield planted


def _refuse_other_parameters(name: str, original: Callable[..., Any], fault: Callable[..., Any]) -> None:
    """Refuse a fault that cannot be called as the original is: that would raise, and look like a detection.

    Raises:
        TypeError: it takes other parameters.
    """
    needed = [
        parameter for parameter in signature(original).parameters.values() if parameter.default is parameter.empty
    ]
    positional = [None for item in needed if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    named = {item.name: None for item in needed if item.kind is item.KEYWORD_ONLY}
    try:
        signature(fault).bind(original, *positional, **named)
    except TypeError as error:
        raise TypeError(f"what replaces {name} cannot be called as that is: {error}") from error


def replacing(*changes: Change) -> Callable[[], AbstractContextManager[InjectedFault]]:
    """Return what plants the changes when it is called."""
    return lambda: replaced(*changes)


def device_of(arguments: Any) -> AbstractContextManager[Any]:
    """Return the device on which tensors are made from now on: that of the first argument that is on a GPU."""
    devices = (x.device for x in _tensors(arguments) if x.device.type != "cpu")
    return next(devices, nullcontext())


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of arguments, and those that batches among them hold."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from (x for field in fields(leaf) if isinstance(x := getattr(leaf, field.name), torch.Tensor))


def _counted(original: Callable[..., Any], fault: Callable[..., Any], planted: InjectedFault) -> Callable[..., Any]:
    @wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        planted.num_calls += 1
        with device_of((args, kwargs)):  # where a fault makes tensors of its own
            return fault(original, *args, **kwargs)

    return counted
