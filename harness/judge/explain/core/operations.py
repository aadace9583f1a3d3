"""Single operations computed by themselves, on any inputs, by HF's own modules."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from harness.formats.taps import Kind, Operation
from harness.oracle.model import HFModel
from harness.oracle.precision import PreservePrecision, upcast_parameters


def replay(hf: HFModel, operation: Operation, inputs: list[torch.Tensor]) -> torch.Tensor | None:
    """Return what an operation gives row by row: [rows, W] float64; None if it cannot be computed by itself.

    Args:
        hf: the model.
        operation: a product, a norm, a sum or a gated activation.
        inputs: [rows, ...] float64 in the order of `operation.inputs`.
    """
    flat = [x.flatten(1) for x in inputs]
    if operation.kind in (Kind.LINEAR, Kind.NORM):
        module = hf.module(operation.module)  # of another part of the model, maybe, than what is explained
        with hf.weights.held(hf.part_of(operation.module)), upcast_parameters(torch.float64, module):
            return _of_module(module, operation, flat[0])
    if operation.kind is Kind.ADD and len(flat) == 2 and flat[0].shape == flat[1].shape:
        return flat[0] + flat[1]
    if operation.kind is Kind.ACTIVATION and (function := activation_of(hf, operation)) is not None:
        gate, up = factors_of(operation, flat)
        activated: torch.Tensor = function(gate)
        return activated if up is None else activated * up
    return None


def _of_module(module: Any, operation: Operation, x: torch.Tensor) -> torch.Tensor | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    x = x.to(weight.device)
    if operation.source.endswith(":linear"):
        bias = getattr(module, "bias", None)
        bias = bias.to(torch.float64) if isinstance(bias, torch.Tensor) else None
        return torch.nn.functional.linear(x, weight.to(torch.float64), bias).cpu()
    if operation.kind is Kind.NORM and x.shape[-1] != weight.shape[0]:  # norms of q and k see heads
        if x.shape[-1] % weight.shape[0]:  # what is normed is a part of its input
            return None
        x = x.unflatten(-1, (-1, weight.shape[0]))
    with PreservePrecision(torch.float64):
        result: torch.Tensor = module(x)
    return result.flatten(1).cpu().to(torch.float64)


def factors_of(operation: Operation, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return gate and up of an activation, [rows, W]; None for up if it has none.

    Both may come as one, gate first, from a fused projection.
    """
    gate, *others = inputs
    if others:
        return gate, others[0]
    if gate.shape[1] == 2 * prod(operation.shape):
        gate, up = gate.chunk(2, dim=1)
        return gate, up
    return gate, None


def activation_of(hf: HFModel, operation: Operation) -> Any:
    """Return the activation function beside the module that reads a gated product; None if there is none."""
    parent = hf.module(operation.module.rpartition(".")[0])
    return next((getattr(parent, name) for name in ("act_fn", "activation_fn", "act") if hasattr(parent, name)), None)
