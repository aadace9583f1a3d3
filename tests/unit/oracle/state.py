"""What the oracle may touch while it works, and must have put back."""

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from harness.oracle.decoder import Decoder


def bits(model: nn.Module) -> dict[str, tuple[torch.dtype, int, bytes]]:
    """Return dtype, storage and bytes of every parameter and buffer."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name: (x.dtype, x.data_ptr(), x.detach().contiguous().view(torch.uint8).numpy().tobytes())
        for name, x in tensors
    }


def surroundings(decoder: Decoder) -> dict[str, object]:
    """Return HF's registries, the model's attention setting, all hooks, and torch's switches."""
    hooks = {
        name: [list(getattr(module, table)) for table in ("_forward_hooks", "_forward_pre_hooks")]
        for name, module in decoder.model.named_modules()
    }
    return {
        "attention": dict(AttentionInterface._global_mapping),
        "masks": dict(AttentionMaskInterface._global_mapping),
        "implementation": decoder.config._attn_implementation,
        "hooks": hooks,
        "forwards": {name: "forward" in vars(module) for name, module in decoder.model.named_modules()},
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "grad": torch.is_grad_enabled(),
    }
