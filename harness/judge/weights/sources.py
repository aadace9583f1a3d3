"""Weights of any origin as tensors by name: a checkpoint's folder, a module, or a state dict."""

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint, resolve
from harness.formats.checkpoint.checkpoint import read_shard

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts of names that torch.compile, FSDP and gradient checkpointing add."""


def plain_name(name: str) -> str:
    """Return a tensor's name without what wrappers add."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor: all ranks gather one that they share (FSDP's fully_shard, tensor parallelism)."""
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def merged(module: Any, *, where: str) -> Any:
    """Return a copy of a module of PEFT with its adapters merged in float32; any other module as it is.

    Raises:
        HarnessError: BAD_OPTION: the adapters cannot be merged into weights.
    """
    if not getattr(module, "peft_config", None):
        return module
    try:
        with warnings.catch_warnings(action="ignore"):  # PEFT warns if they are merged already
            return copy.deepcopy(module).float().merge_and_unload()
    except Exception as error:  # PEFT's, by the kind of adapter
        kinds = ", ".join(item.peft_type for item in module.peft_config.values())
        raise HarnessError(
            Code.BAD_OPTION,
            f"adapters of this kind cannot be merged: {kinds}",
            where=where,
            expected="a module without adapters, or LoRA as peft.get_peft_model adds it",
            actual=type(module).__name__,
            hint="give a copy with plain weights",
        ) from error


def _in_memory(engine: Any, where: str) -> Any:
    """Return the tensors of an engine in this process by name, those of further ranks with the rank as prefix.

    The engine has `weights()`, as the reference engine and each `Session` do, or is vLLM's `LLM`. Any other object is
    returned as it is.

    Raises:
        HarnessError: BAD_OPTION: it has packed its weights, as vLLM does on a CPU.
    """
    if callable(getattr(engine, "weights", None)):
        return engine.weights()
    if not hasattr(engine, "apply_model"):
        return engine
    first, *others = engine.apply_model(_copies)
    shards = {
        f"{at}.{name}": tensor
        for at, tensors in enumerate(others, 1)
        for name, tensor in tensors.items()
        if name not in first or not torch.equal(tensor, first[name])  # otherwise each rank has all of it
    }
    packed = [name for name, tensor in first.items() if not tensor.numel()]
    if packed:
        raise HarnessError(
            Code.BAD_OPTION,
            "the engine keeps weights in a packed form, which cannot be read",
            where=where,
            expected="parameters as they were loaded",
            actual=f"{len(packed)} empty ones: {packed[0]}, ...",
            hint="compare the folder that it loads",
        )
    return {**first, **shards}


def _copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in model.named_parameters()}


def is_sharded(module: Any) -> bool:
    """Whether ranks share a module's weights as DTensors, as fully_shard and tensor parallelism do."""
    return isinstance(module, nn.Module) and any(hasattr(parameter, "full_tensor") for parameter in module.parameters())


def unsharded(model: Any) -> Any:
    """Return a copy of a model of HF's with whole weights, if ranks share them; else the model as it is."""
    if not is_sharded(model):
        return model
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    whole.load_state_dict({plain_name(name): gathered(tensor) for name, tensor in model.state_dict().items()})
    return whole


class TensorSource:
    """Tensors by name, each read on access."""

    def __init__(
        self,
        name: str,
        read: Mapping[str, Callable[[], torch.Tensor]],
        shapes: Mapping[str, Any],
        folder: Path | None = None,
    ) -> None:
        self.name, self._read, self.shapes, self.folder = name, read, shapes, folder

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read[name]()

    @classmethod
    def of(cls, weights: Any, *, where: str, local_files_only: bool = True) -> "TensorSource":
        """Return the tensors of a folder, a module or a state dict.

        Raises:
            HarnessError: BAD_OPTION, or what is wrong with the checkpoint.
        """
        if isinstance(weights, str | Path):
            return cls._of_folder(Path(resolve(str(weights), local_files_only=local_files_only)))
        named = (
            merged(weights, where=where).state_dict() if isinstance(weights, nn.Module) else _in_memory(weights, where)
        )
        if not isinstance(named, Mapping) or not all(isinstance(item, torch.Tensor) for item in named.values()):
            what, expected = "these are no weights", "a checkpoint's folder, a module, an engine, or tensors by name"
            raise HarnessError(
                Code.BAD_OPTION, what, where=where, expected=expected, actual=f"{type(weights).__name__}"
            )
        tensors = {plain_name(str(name)): tensor for name, tensor in named.items()}
        read = {name: (lambda tensor=tensor: gathered(tensor)) for name, tensor in tensors.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return cls(type(weights).__name__, read, shapes)

    @classmethod
    def _of_folder(cls, folder: Path) -> "TensorSource":
        tensors = Checkpoint(folder).tensors
        readers = {name: partial(read_shard, path, name) for name, (_, path) in tensors.items()}
        return cls(str(folder), readers, {name: entry.shape for name, (entry, _) in tensors.items()}, folder)
