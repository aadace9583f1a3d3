"""A GGUF file once more with all of its tensors in float32: its graph is the same, and its numbers are HF's."""

from pathlib import Path
from typing import Any

import numpy as np

from harness.formats.checkpoint.gguf.model import GGUFModel
from harness.formats.checkpoint.gguf.weights import gguf_package, read_tensor
from harness.formats.checkpoint.gguf.writer import finish


def write_plain_file(model: GGUFModel, path: Path) -> Path:
    """Write the copy.

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
