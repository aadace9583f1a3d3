"""torchao's forms: transformers quantises a checkpoint while it loads it, and torchao's kernels run it."""

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.engines.quantised_form import load_quantised
from harness.formats.checkpoint import Checkpoint
from harness.oracle.model import HFModel, load_model


@torch.no_grad()
def torchao_models(
    module: str, config: str, checkpoint: Checkpoint, scratch: Path, **options: Any
) -> tuple[Any, HFModel]:
    """Return the quantised model, and the original with the dequantised weights.

    Args:
        module: that has the configuration's class.
        config: the name of that class.
        checkpoint: the original.
        scratch: not used.
        options: of the configuration.
    """
    from transformers import TorchAoConfig

    made = getattr(importlib.import_module(module), config)(**options)
    quantised = load_quantised(checkpoint.folder, quantization_config=TorchAoConfig(made))
    exact = load_model(checkpoint, dtype=torch.float32, stays=True)
    for path, part in quantised.named_modules():
        if isinstance(part, nn.Linear) and hasattr(part.weight, "__tensor_flatten__"):
            exact.module(path).weight.copy_(_dequantised(part.weight))  # type: ignore[operator]
    return quantised, exact


def _dequantised(weight: Any) -> torch.Tensor:
    """[out, in] float32.

    The layout of packed weights for a CPU is known to their kernel alone, which has no function that unpacks them. Its
    product with the identity is the weights: each sum has one term that is not zero.
    """
    if type(weight).dequantize is torch.Tensor.dequantize:
        values: torch.Tensor = nn.functional.linear(torch.eye(weight.shape[1]), weight).T
        return values
    return weight.dequantize()  # type: ignore[no-any-return]
