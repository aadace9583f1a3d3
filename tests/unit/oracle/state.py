"""What the oracle may touch while it works, and must have put back."""

import threading

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import AttentionInterface, AttentionMaskInterface

from harness.oracle.model import HFModel

Bits = dict[str, tuple[torch.dtype, int, bytes]]


def bits(model: nn.Module) -> Bits:
    """Return dtype, storage and bytes of every parameter and buffer."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name: (x.dtype, x.data_ptr(), b"" if x.is_meta else x.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, x in tensors
    }


def surroundings(hf: HFModel) -> dict[str, object]:
    """Return HF's registries, the model's settings, all hooks, threads, and torch's modes and switches."""
    hooks = {
        name: [list(getattr(module, table)) for table in ("_forward_hooks", "_forward_pre_hooks")]
        for name, module in hf.model.named_modules()
    }
    return {
        "attention": dict(AttentionInterface._global_mapping),
        "masks": dict(AttentionMaskInterface._global_mapping),
        "config": {name: repr(value) for name, value in vars(hf.config).items()},
        "hooks": hooks,
        "forwards": {name: "forward" in vars(module) for name, module in hf.model.named_modules()},
        "on meta": [name for name, x in hf.model.named_parameters(remove_duplicate=False) if x.is_meta],
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "grad": torch.is_grad_enabled(),
        "function modes": _get_current_function_mode_stack(),
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "threads": [thread.name for thread in threading.enumerate() if thread.name == "control"],
    }
