"""An `nn.Module` as an engine, without an entry point: HF's own classes, or a user's own."""

import inspect
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from harness.engines.adapter import Engine
from harness.engines.by_content import StepEngine
from harness.engines.module.engine import TorchEngine
from harness.engines.module.hf_object import HFObjectEngine
from harness.engines.module.stepper import ModuleStepper
from harness.engines.module.weights import check_has_values, module_device, module_dtype
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.oracle.model import HFModel

__all__ = ["TorchEngine", "check_has_values", "module_device", "module_dtype", "module_engine"]


def module_engine(
    module: nn.Module, *, folder: Path, dtype: str, device: str, names: Mapping[str, str] | None = None
) -> Engine:
    """Return the engine that runs a module.

    A model of HF's is run with its own cache, in batches and chunks, and its attention is watched. Any other module is
    run one request at a time; where none of its modules is called as in the checkpoint, its tensors are told by what
    they hold.

    Args:
        module: with its weights.
        folder: checkpoint of the model that it should be.
        dtype: of its weights.
        device: where it is.
        names: paths of its modules, and HF's paths of the same.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: it is compiled, or its forward cannot be called; BAD_OPTION: bad names.
    """
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            "the module is compiled, so that nothing between its input and its output can be seen",
            where=type(module).__name__,
            expected="a module before torch.compile",
            hint="pass the module that was compiled",
        )
    if names is None and isinstance(module, PreTrainedModel) and _is_called_as_hf(module):
        dtypes = getattr(torch, dtype)
        checkpoint, where = Checkpoint(folder), torch.device(device)
        return HFObjectEngine(HFModel(model=module, checkpoint=checkpoint, dtype=dtypes, device=where))
    if names is None and not _has_names_of(Checkpoint(folder), module):
        stepper = ModuleStepper(module, torch.device(device))
        return StepEngine(lambda: stepper, name=type(module).__name__, folder=folder, dtype=dtype)
    return TorchEngine(module, device=device, names=names)


def _has_names_of(checkpoint: Checkpoint, module: nn.Module) -> bool:
    """Whether most weights of a checkpoint are called so in a module, too."""
    own = {name for name, _ in module.named_parameters()}
    return 2 * sum(name in own for name in checkpoint.tensors) >= len(checkpoint.tensors)


def _is_called_as_hf(model: PreTrainedModel) -> bool:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any or {"input_ids", "use_cache"} <= set(parameters)
