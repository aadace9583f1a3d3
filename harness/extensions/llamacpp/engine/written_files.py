"""Files that llama.cpp is given in the place of a user's: a LoRA adapter of PEFT's, and a GGUF file in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.architecture import Metadata
from harness.extensions.llamacpp.gguf.model import GGUFModel
from harness.extensions.llamacpp.gguf.names import gguf_name, is_query_or_key
from harness.extensions.llamacpp.gguf.weights import gguf_package, read_tensor, rows_of_gguf
from harness.extensions.llamacpp.gguf.writer import finish
from harness.oracle.lora import read_adapter


def write_adapter_file(lora: Path, metadata: Metadata, path: Path) -> Path:
    """Write an adapter in PEFT's format as a GGUF file in float32, as llama.cpp's convert_lora_to_gguf.py does.

    Raises:
        HarnessError: PACKAGE_MISSING, BAD_LORA, or ENGINE_CANNOT_SERVE: it changes a module that GGUF has no name for.
    """
    gguf = gguf_package()
    writer = gguf.GGUFWriter(path, metadata.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    # llama.cpp scales by alpha over the rank of each tensor: all scales are in B, and alpha is left out.
    for module, update in read_adapter(lora).items():
        name = gguf_name(f"{module}.weight")
        if name is None:
            what = "the adapter changes a module that llama.cpp has no name for"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where=lora, actual=module)
        b = update.b.float() * update.scaling
        if metadata.family.permutes_heads and is_query_or_key(f"{module}.weight"):
            is_key = module.endswith("k_proj")
            b = rows_of_gguf(b, metadata.count("attention.head_count_kv" if is_key else "attention.head_count"))
        writer.add_tensor(f"{name}.lora_a", update.a.float().contiguous().numpy())
        writer.add_tensor(f"{name}.lora_b", torch.as_tensor(b).contiguous().numpy())
    finish(writer)
    return path


def write_plain_file(model: GGUFModel, path: Path) -> Path:
    """Write a GGUF file once more with all of its tensors in float32: its graph is the same, and its numbers are HF's.

    Raises:
        HarnessError: PACKAGE_MISSING, or UNSUPPORTED_GGUF for a type that cannot be dequantised.
    """
    gguf = gguf_package()
    writer: Any = gguf.GGUFWriter(path, model.metadata.architecture)
    for field in gguf.GGUFReader(model.path).fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            own = field.types[-1] if is_array else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=own)
    for name, (tensor, file) in model.tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(read_tensor(tensor, file).float().numpy()))
    finish(writer)
    return path
