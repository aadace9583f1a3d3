"""Faults of a mixture of experts: their order, and how many are chosen."""

from torch import nn

from harness.extensions.faults.placed.plan import PlacedPlan, places, set_parameter

COUNTS = ("num_experts", "num_routed_experts")


def swapped(model: nn.Module) -> list[PlacedPlan]:
    """The weights of two experts of one layer are exchanged."""

    def inject(module: nn.Module, first: int) -> None:
        for name, parameter in of_experts(module).items():
            order = list(range(len(parameter)))
            order[first : first + 2] = order[first : first + 2][::-1]
            set_parameter(module, name, parameter[order])

    neighbours = (0, 2, 4)  # not every expert is chosen by some token of a short text
    return [
        plan for first in neighbours for plan in places(model, of_experts, lambda module, at=first: inject(module, at))
    ]


def of_experts(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters [experts, ...] of a module that holds the matrices of several experts."""
    counts = {getattr(module, name, None) for name in COUNTS}
    parameters = {
        name: value for name, value in module.named_parameters(recurse=False) if counts & set(value.shape[:1])
    }
    return parameters if any(value.dim() == 3 for value in parameters.values()) else {}


def one_less(model: nn.Module) -> list[PlacedPlan]:
    """One expert less is chosen for each token of one layer."""
    return places(model, chooses, lambda module: setattr(module, "top_k", module.top_k - 1))


def chooses(module: nn.Module) -> bool:
    """Tell the innermost module that knows how many experts are chosen."""
    inner = [child for child in module.modules() if child is not module]
    return has_several(module) and not any(has_several(child) for child in inner)


def has_several(module: nn.Module) -> bool:
    top_k = getattr(module, "top_k", None)
    return isinstance(top_k, int) and top_k > 1
