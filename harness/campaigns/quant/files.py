"""A model as GGUF in a type: written as it is, or by llama.cpp's own quantiser."""

from pathlib import Path

from harness.campaigns.quant.hf.types import HF_TYPES
from harness.engines.llamacpp.tensor import llama
from harness.errors import Code, HarnessError
from harness.formats.checkpoint.gguf.types import PLAIN
from harness.formats.checkpoint.gguf.writer import write_gguf

_FILE_TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q3_K_S": 11, "Q3_K_M": 12,
    "Q3_K_L": 13, "Q4_K": 14, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K": 16, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18,
    "IQ4_NL": 25, "IQ4_XS": 30,
}  # fmt: skip
"""Numbers of `llama_ftype` in llama.h."""
_MIXED = ("_S", "_M", "_L")
"""Ends of the names of mixtures, which keep some tensors in finer types; all others are one type throughout."""
NAMES = (*PLAIN, *_FILE_TYPES, *HF_TYPES)
"""Of types of GGUF, which come first, and of HuggingFace's forms."""


def check_type(name: str) -> str:
    """Return the name of a type as it is written here.

    Raises:
        HarnessError: BAD_OPTION.
    """
    found = next((each for each in NAMES if each.lower() == name.strip().lower()), None)
    if found is None:
        raise HarnessError(
            Code.BAD_OPTION,
            f"there is no type {name.strip()!r} to quantise to",
            where="--types",
            expected=", ".join(NAMES),
            actual=name,
            hint="--types F16,Q8_0,Q4_K,torchao-int8",
        )
    return found


def make_file(checkpoint: Path, name: str, folder: Path) -> Path:
    """Write the model in a type; llama.cpp puts rows that are no whole number of its blocks in another one.

    Args:
        checkpoint: in HF's layout.
        name: a type of GGUF.
        folder: where to write; the float32 file is kept there for the next type.

    Raises:
        HarnessError: PACKAGE_MISSING, UNSUPPORTED_ARCHITECTURE, or ENGINE_FAILED: the quantiser refuses.
    """
    path = folder / f"{name}.gguf"
    if name in PLAIN:
        return path if path.exists() else write_gguf(checkpoint, path, name)
    return quantise(make_file(checkpoint, "F32", folder), path, name)


def quantise(source: Path, path: Path, name: str) -> Path:
    """Write a GGUF file in a type, by llama.cpp's own quantiser.

    Args:
        source: the file, in float32.
        path: of the file to write.
        name: a type that is not plain.

    Raises:
        HarnessError: PACKAGE_MISSING, or ENGINE_FAILED: the quantiser refuses.
    """
    library = llama()
    params = library.llama_model_quantize_default_params()
    params.ftype, params.nthread = _FILE_TYPES[name], 1
    params.pure = not name.endswith(_MIXED)
    status = library.llama_model_quantize(str(source).encode(), str(path).encode(), library.ctypes.byref(params))
    if status != 0:
        raise HarnessError(
            Code.ENGINE_FAILED,
            "llama.cpp's quantiser refuses",
            where=f"--types {name}",
            actual=f"status {status}",
            hint=f"harness inspect {source}",
        )
    return path
