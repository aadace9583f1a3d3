"""A model as GGUF in a type: written as it is, or by llama.cpp's own quantiser.

Rows are filled up with zeros to 256 weights, which K-quants need: norms divide by the number of channels, and with 4^k
times as many, most of them zero, a row is scaled by 2^k, which the norm's weight and eps take back. Both are powers of
two, so that every number stays the same bit for bit, but for the order in which sums are added. Heads that are added
read and write nothing.

The importance matrix is that of `IMatrixCollector` in llama.cpp's tools/imatrix: the mean square of each input over the
tokens of a text.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.engine.tensor import llama
from harness.extensions.llamacpp.gguf import GGUFTensor
from harness.extensions.llamacpp.gguf.architecture import gguf_name
from harness.extensions.llamacpp.gguf.header import BY_NAME, PLAIN
from harness.extensions.llamacpp.gguf.writer import write_gguf
from harness.extensions.quant.forward import hf_distributions
from harness.extensions.quant.hf_types import HF_TYPES
from harness.formats.checkpoint.converted import MADE_FROM
from harness.oracle.model import HFModel, load_model

Importance = Mapping[str, torch.Tensor]
"""By GGUF's name of a weight: [inputs] float32."""


def importance_of(hf: HFModel, sequences: Sequence[Sequence[int]]) -> Importance:
    """Return the mean square of each input of each linear layer over some tokens.

    The token ids are other ones than those that the cost is measured on.
    """
    sums: dict[str, torch.Tensor] = {}
    with _watched(hf, sums):
        hf_distributions(hf, sequences)
    return {name: total / sum(map(len, sequences)) for name, total in sums.items()}


@contextmanager
def _watched(hf: HFModel, sums: dict[str, torch.Tensor]) -> Iterator[None]:
    with ExitStack() as hooks:
        for path, part in hf.model.named_modules():
            name = gguf_name(f"{path}.weight") if isinstance(part, nn.Linear) else None
            if name is not None:
                hook = part.register_forward_pre_hook(partial(_add_squares, sums, name))
                hooks.callback(hook.remove)
        yield


def _add_squares(sums: dict[str, torch.Tensor], name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
    squares = inputs[0].float().square().flatten(0, -2).sum(dim=0)
    sums[name] = sums[name] + squares if name in sums else squares


ROW = 256
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def pad_checkpoint(folder: Path, out: Path, *, row: int = ROW) -> Path:
    """Write the checkpoint in `folder`, filled up, to the new folder `out`.

    Raises:
        HarnessError: UNSUPPORTED_ARCHITECTURE.
    """
    hf = load_model(folder, dtype=torch.float32, stays=True)
    old = hf.config
    if old.model_type not in _FAMILIES:
        raise HarnessError(
            Code.UNSUPPORTED_ARCHITECTURE,
            "models of this family cannot be filled up",
            where=folder,
            expected=", ".join(_FAMILIES),
            actual=old.model_type,
            hint="leave --pad out",
        )
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*", "*.gguf", MADE_FROM))
    new = _sizes(old, hf.head_dim, row)
    config = json.loads((folder / "config.json").read_bytes())
    gain = old.hidden_size / new["hidden_size"]
    config |= {**new, "head_dim": hf.head_dim, "rms_norm_eps": old.rms_norm_eps * gain, "dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {
        name: _padded(name, values, old, new, hf.head_dim, gain**0.5)
        for name, values in hf.model.state_dict().items()
        if not (name == "lm_head.weight" and old.tie_word_embeddings)
    }
    save_file(tensors, out / "model.safetensors")
    return out


def _sizes(old: Any, head_dim: int, row: int) -> dict[str, int]:
    hidden, kv_heads = old.hidden_size, old.num_key_value_heads
    groups = old.num_attention_heads // kv_heads
    while hidden % row:
        hidden *= 4
    while groups * kv_heads * head_dim % row:
        kv_heads += 1
    return {
        "hidden_size": hidden,
        "intermediate_size": -(-old.intermediate_size // row) * row,
        "num_attention_heads": groups * kv_heads,
        "num_key_value_heads": kv_heads,
    }


def _padded(
    name: str, values: torch.Tensor, old: Any, new: Mapping[str, int], head_dim: int, scale: float
) -> torch.Tensor:
    """Put a tensor into the corner of a larger one of zeros."""
    sizes = {
        "hidden": new["hidden_size"],
        "ffn": new["intermediate_size"],
        "q": new["num_attention_heads"] * head_dim,
        "kv": new["num_key_value_heads"] * head_dim,
        "vocab": values.shape[0],
        "head": head_dim,
    }
    part = name.rpartition(".")[0].rpartition(".")[2]
    kinds = _SHAPES[part][: values.ndim]
    padded = torch.zeros([sizes[kind] for kind in kinds])
    padded[tuple(slice(0, size) for size in values.shape)] = values
    return padded * scale if part in _NORMS_OF_HIDDEN else padded


_NORMS_OF_HIDDEN = ("input_layernorm", "post_attention_layernorm", "norm")
_SHAPES = {
    "embed_tokens": ("vocab", "hidden"),
    "lm_head": ("vocab", "hidden"),
    "q_proj": ("q", "hidden"),
    "k_proj": ("kv", "hidden"),
    "v_proj": ("kv", "hidden"),
    "o_proj": ("hidden", "q"),
    "gate_proj": ("ffn", "hidden"),
    "up_proj": ("ffn", "hidden"),
    "down_proj": ("hidden", "ffn"),
    "q_norm": ("head",),
    "k_norm": ("head",),
    **dict.fromkeys(_NORMS_OF_HIDDEN, ("hidden",)),
}
"""Dimensions of each part's weight; a bias has the first of them."""


_FILE_TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q3_K_S": 11, "Q3_K_M": 12,
    "Q3_K_L": 13, "Q4_K": 14, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K": 16, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18,
    "Q2_K_S": 21, "IQ1_S": 24, "IQ1_M": 31, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ2_S": 28, "IQ2_M": 29, "IQ3_XXS": 23,
    "IQ3_XS": 22, "IQ3_S": 26, "IQ3_M": 27, "IQ4_NL": 25, "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37,
}  # fmt: skip
"""Numbers of `llama_ftype` in llama.h."""
_MIXTURES = {
    "Q2_K_S": "Q2_K", "Q3_K_S": "Q3_K", "Q3_K_M": "Q3_K", "Q3_K_L": "Q3_K", "Q4_K_S": "Q4_K", "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K", "Q5_K_M": "Q5_K", "IQ1_S": "IQ1_S", "IQ1_M": "IQ1_M", "IQ2_XXS": "IQ2_XXS", "IQ2_XS": "IQ2_XS",
    "IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S", "IQ3_XXS": "IQ3_XXS", "IQ3_XS": "IQ3_S", "IQ3_S": "IQ3_S", "IQ3_M": "IQ3_S",
}  # fmt: skip
"""Types that keep some tensors in finer ones, and the type of most; all others are one type throughout."""
_BY_IMPORTANCE = frozenset({"Q2_K_S", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS"})
"""Mixtures that llama.cpp makes only with an importance matrix."""
NAMES = (*PLAIN, *_FILE_TYPES, *HF_TYPES)
"""Of types of GGUF, which come first, and of HuggingFace's forms."""


def check_type(name: str) -> str:
    """Return the name of a type as it is written here.

    Raises:
        HarnessError: BAD_OPTION.
    """
    known = next((item for item in NAMES if item.lower() == name.strip().lower()), None)
    if known is None:
        raise HarnessError(
            Code.BAD_OPTION,
            f"there is no type {name.strip()!r} to quantise to",
            where="--types",
            expected=", ".join(NAMES),
            actual=name,
            hint="--types F16,Q8_0,Q4_K,torchao-int8",
        )
    return known


def make_file(hf: HFModel, name: str, folder: Path, importance: Callable[[], Importance]) -> Path:
    """Write the model in a type; llama.cpp puts rows that are no whole number of its blocks in another one.

    The float32 file is kept in the folder for the next type; `importance` is called for a type that needs it.

    Raises:
        HarnessError: PACKAGE_MISSING, UNSUPPORTED_ARCHITECTURE, or ENGINE_FAILED: the quantiser refuses.
    """
    path = folder / f"{name}.gguf"
    if name in PLAIN:
        return path if path.exists() else write_gguf(hf.folder, path, name)
    source = make_file(hf, "F32", folder, importance)
    return quantise(source, path, name, importance() if name in _BY_IMPORTANCE else None)


def quantise(source: Path, path: Path, name: str, importance: Importance | None = None) -> Path:
    """Write a GGUF file in a type, by llama.cpp's own quantiser.

    The source is in float32, and the type is not plain; `importance` is of the inputs of each weight, by GGUF's name.

    Raises:
        HarnessError: PACKAGE_MISSING, or ENGINE_FAILED: the quantiser refuses.
    """
    library = llama()
    params = library.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.pure = _FILE_TYPES[name], 1, name not in _MIXTURES
    entries = _entries(library, importance or {})  # read while the quantiser runs
    if importance:
        params.imatrix = entries
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


def _entries(library: Any, importance: Importance) -> Any:
    """Return llama.cpp's own form of an importance matrix: an array that ends with an entry without a name."""
    entry, number = library.llama_model_imatrix_data, library.ctypes.c_float
    entries = [
        entry(name.encode(), (number * len(values))(*values.tolist()), len(values))
        for name, values in importance.items()
    ]
    return (entry * (len(entries) + 1))(*entries)


def note_on(name: str, tensors: Iterable[GGUFTensor]) -> str:
    """Say how many matrices are in another type than the one that was asked for, since their rows do not fit it."""
    main = _MIXTURES.get(name, name)
    block_size = BY_NAME[main][1].block_size
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    others = sum(tensor.shape[-1] % block_size != 0 for tensor in matrices)
    if not others:
        return ""
    return f"{others} of {len(matrices)} matrices are not {main}: their rows are no multiple of {block_size} weights"
