"""Tensors of a side by the names of the model's parameters."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from harness.errors import Code, HarnessError
from harness.judge.weights.sources import gathered, merged, plain_name
from harness.oracle.model import HFModel, load_model


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters, whole and with its adapters merged, by their names without wrappers."""
    whole = merged(module, where="--trainer")
    return {plain_name(name): gathered(tensor) for name, tensor in whole.named_parameters()}


def load_tensors(folder: Path, hf: HFModel, where: str) -> dict[str, torch.Tensor]:
    """Return the tensors of another checkpoint of the model, in its dtype.

    Raises:
        HarnessError: BAD_OPTION: it is a checkpoint of another model; or it cannot be read.
    """
    tensors = named_tensors(load_model(folder, dtype=hf.dtype, stays=True).model)
    odd = misfit(hf, tensors)
    if odd is None:
        return tensors
    raise HarnessError(
        Code.BAD_OPTION,
        "the checkpoint is one of another model",
        where=where,
        expected=f"the tensors of {hf.folder}, names and shapes",
        actual=f"{odd} differs",
        hint="name another version of the weights of --model",
    )


def misfit(hf: HFModel, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of a tensor that only one side has, or that has another shape; None if there is none."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    own = {name: tensor.shape for name, tensor in hf.model.named_parameters()}
    return next((name for name in {**own, **shapes} if own.get(name) != shapes.get(name)), None)


def other_tensors(hf: HFModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return those tensors that differ from the model's, in its dtype."""
    own = dict(hf.model.named_parameters())
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in own and tensor.shape == own[name].shape
        and not torch.equal(tensor.to(own[name].device, own[name].dtype), own[name])
    }  # fmt: skip
