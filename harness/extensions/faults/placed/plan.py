"""A plan: how to make exactly one operation of a loaded model wrong, found from the model's own attributes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPlan:
    """How a fault is planted into one place of one model."""

    sites: tuple[str, ...]
    """Paths of the modules that may be blamed, in the order of the run. The empty path is the model itself."""
    inject: Callable[[], None]
    """Makes the model wrong, in place."""
    blames_user: bool = False
    """The module's results are a table for others: the first one that is wrong because of it may be blamed, too."""


def places(
    model: nn.Module,
    condition: Callable[[nn.Module], Any],
    inject: Callable[[nn.Module], None],
    *,
    sites: Callable[[nn.Module], Iterable[str]] = lambda module: ("",),
    blames_user: bool = False,
) -> list[PlacedPlan]:
    """Return a plan for each module that meets a condition, from the middle of the model outwards.

    Args:
        model: the model. Nothing of it is changed.
        condition: of a module; any true value counts.
        inject: makes one module wrong.
        sites: the modules inside of it that may be blamed, by their paths in it; itself if not given.
        blames_user: see PlacedPlan.
    """
    matches = [(path, module) for path, module in model.named_modules() if condition(module)]
    return [
        PlacedPlan(
            sites=tuple(f"{path}.{site}".strip(".") for site in sites(module)),
            inject=lambda module=module: inject(module),
            blames_user=blames_user,
        )
        for path, module in from_the_middle(matches)
    ]


def from_the_middle(items: Iterable[Any]) -> list[Any]:
    """Order items by their distance from the middle: the first layer and the last norm are special more often."""
    items = list(items)
    order = sorted(range(len(items)), key=lambda at: abs(at - len(items) // 2))
    return [items[at] for at in order]


def number_in(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """Return the first name under which a module holds a number, as an attribute or a buffer of one element."""
    for name in names:
        value = vars(module).get(name, dict(module.named_buffers(recurse=False)).get(name))
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return name
        if isinstance(value, int | float) and not isinstance(value, bool):
            return name
    return None


def set_number(module: nn.Module, name: str, value: float) -> None:
    """Set a number, whether it is an attribute or a buffer."""
    old = getattr(module, name)
    setattr(module, name, torch.full_like(old, value) if isinstance(old, torch.Tensor) else value)


def set_parameter(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Give a module a parameter of its own: one that was tied stays as it is for the others."""
    setattr(module, name, nn.Parameter(value.detach().clone(), requires_grad=False))
