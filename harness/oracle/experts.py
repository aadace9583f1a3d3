"""HF's module of experts, called with rows and the experts that are chosen for them.

`R` rows, `E` experts, `C` chosen ones of a row, `D` elements of a row.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from harness.formats.taps import Graph, Kind, Operation


def num_experts(module: nn.Module) -> int | None:
    """Return how many experts a module holds as tensors of [E, ...]; None for one that holds none.

    Some families have experts without weights besides, for which one of the tensors has places.
    """
    counts = {len(parameter) for parameter in module.parameters(recurse=False) if parameter.dim() == 3}
    return max(counts) if counts else None


def reads_slots(module: nn.Module) -> bool:
    """Whether a module of experts reads nothing but rows, a slot of them for each expert."""
    return num_experts(module) is not None and len(inspect.signature(module.forward).parameters) == 1


def arguments_of(
    graph: Graph, operation: Operation, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return rows [R, D], chosen experts [R, C] int64 and weights [R, C] of an operation that reads these three.

    None for another operation.
    """
    is_choice = [graph[tap].kind is Kind.CHOICE for tap in operation.inputs]
    if len(inputs) != 3 or is_choice.count(True) != 1:
        return None
    flat = [item.flatten(1) for item in inputs]
    chosen = flat.pop(is_choice.index(True)).to(torch.int64)
    x, weights = sorted(flat, key=lambda item: -item.shape[1])
    return x, chosen, weights


def run_experts(module: nn.Module, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return HF's experts of rows x [R, D]: [R, D] float64."""
    device = next(module.parameters()).device
    if reads_slots(module):
        return _run_slots(module, x, chosen, weights)
    if chosen.shape[1] == 1:  # some families know no single one: it is there twice, once with the weight 0
        chosen, weights = chosen.expand(-1, 2), torch.cat((weights, torch.zeros_like(weights)), dim=1)
    output: Any = module(x.to(device), chosen.to(device), weights.to(device))
    added: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return added.to("cpu", torch.float64).reshape(x.shape)


def _run_slots(module: nn.Module, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the outputs of the chosen experts [R, C], weighted and added: every expert computes every row."""
    device, count = next(module.parameters()).device, num_experts(module)
    slots: torch.Tensor = module(x.to(device).repeat(count or 1, 1)).to("cpu", torch.float64)
    picked: torch.Tensor = slots.unflatten(0, (count or 1, len(x)))[chosen.T, torch.arange(len(x))]  # [C, R, D]
    return (picked * weights.T[..., None]).sum(dim=0)


def one_expert(module: nn.Module, x: torch.Tensor, expert: int) -> torch.Tensor:
    """Return one expert of rows x [R, D], with the weight 1."""
    chosen = torch.full((len(x), 1), expert)
    return run_experts(module, x, chosen, torch.ones(len(x), 1, dtype=torch.float64))
