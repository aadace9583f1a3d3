"""Faults of weights: taken from elsewhere, exchanged, left out."""

from collections.abc import Iterator

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from harness.extensions.faults.placed.plan import (
    PlacedPlan,
    from_the_middle,
    number_in,
    places,
    set_number,
    set_parameter,
)

EPSILONS = ("variance_epsilon", "eps", "norm_eps")
DECAYS = ("A_log", "time_decay", "recurrent_param")
GATES = (("gate_proj", "up_proj"), ("w1", "w3"), ("proj_up_gate", "proj_up"))


def is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


def is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def norm_eps(model: nn.Module) -> list[PlacedPlan]:
    """The epsilon of one norm is 0.01."""
    return places(
        model,
        lambda module: is_norm(module) and number_in(module, EPSILONS),
        lambda module: set_number(module, number_in(module, EPSILONS), 1e-2),
    )


def norm_weight(model: nn.Module) -> list[PlacedPlan]:
    """One norm applies the weight of another."""
    norms = [module for module in model.modules() if is_norm(module) and isinstance(weight_of(module), nn.Parameter)]

    def twin_of(norm: nn.Module) -> nn.Module | None:
        return next((item for item in norms if item is not norm and item.weight.shape == norm.weight.shape), None)

    return places(
        model,
        lambda module: module in norms and twin_of(module) is not None,
        lambda module: set_parameter(module, "weight", twin_of(module).weight),
    )


def weight_of(module: nn.Module) -> torch.Tensor | None:
    return getattr(module, "weight", None)


def linear_from_elsewhere(model: nn.Module) -> list[PlacedPlan]:
    """One linear module applies the weight of another layer."""

    def plan(path: str, module: nn.Module, twin: nn.Module) -> PlacedPlan:
        return PlacedPlan(sites=(path,), inject=lambda: set_parameter(module, "weight", twin.weight))

    return [plan(*twin) for twin in from_the_middle(twins(model))]


def twins(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield path and module of each linear with one of the same name and shape in an earlier layer, and that one."""
    stacks = [(path, stack) for path, stack in model.named_modules() if isinstance(stack, nn.ModuleList)]
    for stack_path, stack in stacks:
        for index, layer in enumerate(stack):
            for name, module in layer.named_modules():
                for earlier in list(stack)[:index]:
                    twin = dict(earlier.named_modules()).get(name)
                    if is_linear(module) and is_linear(twin) and is_other(twin.weight, module.weight):
                        yield f"{stack_path}.{index}.{name}".strip("."), module, twin


def is_other(weight: torch.Tensor, replaced: torch.Tensor) -> bool:
    return weight is not replaced and weight.shape == replaced.shape


def bias_dropped(model: nn.Module) -> list[PlacedPlan]:
    """The bias of one linear module is left out."""
    return places(
        model,
        lambda module: is_linear(module) and isinstance(module.bias, nn.Parameter),
        lambda module: set_parameter(module, "bias", torch.zeros_like(module.bias)),
    )


def gate_and_up(model: nn.Module) -> list[PlacedPlan]:
    """The gate and the other branch of one gated MLP are exchanged."""

    def inject(module: nn.Module) -> None:
        first, second = (getattr(module, name) for name in gates(module))
        first.weight, second.weight = second.weight, first.weight
        first.bias, second.bias = second.bias, first.bias

    return places(model, gates, inject, sites=gates)


def gates(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the gate and the other branch, if they are two linear modules of the same shape."""
    for names in GATES:
        first, second = (getattr(module, name, None) for name in names)
        if is_linear(first) and is_linear(second) and is_other(first.weight, second.weight):
            return names
    return ()


def state_decay(model: nn.Module) -> list[PlacedPlan]:
    """What the decay of one scan's state is computed from is multiplied by 1.1."""

    def inject(module: nn.Module) -> None:
        name = decay_of(module)
        set_parameter(module, name, getattr(module, name) * 1.1)

    return places(model, decay_of, inject)


def decay_of(module: nn.Module) -> str | None:
    return next((name for name, _ in module.named_parameters(recurse=False) if name in DECAYS), None)
