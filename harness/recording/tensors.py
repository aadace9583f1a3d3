"""Safetensors names of the dtypes that a recording holds, and tensors as bytes and back."""

import torch

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order; no copy is made of a contiguous CPU tensor."""
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return flat.numpy().data
