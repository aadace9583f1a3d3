"""Names that the format fixes, for its writer: what it imports must install into any engine's environment (numpy)."""

from typing import Any

import numpy as np

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
PHASES = ("prefill", "decode", "mixed", "readback")
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
}  # fmt: skip
"""Safetensors names of the dtypes that a recording holds, by the names that torch and numpy give them."""


def dtype_name(tensor: Any) -> str | None:
    """Return the safetensors name of a tensor's dtype; None if no recording holds it."""
    return DTYPES.get(str(tensor.dtype).removeprefix("torch."))


def as_bytes(tensor: Any) -> memoryview:
    """Return the bytes of a tensor, torch's or numpy's, in row-major order; copied only where it must be."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    import torch  # it is there: the tensor is one of its own

    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    data: memoryview = flat.numpy().data
    return data
