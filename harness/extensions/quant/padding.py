"""A small model filled up with zeros to rows of 256 weights, which K-quants need, computing the same.

Norms divide by the number of channels: with 4^k times as many, most of them zero, a row is scaled by 2^k, which the
norm's weight and eps take back. Both are powers of two, so that every number stays the same bit for bit, but for the
order in which sums are added. Heads that are added read and write nothing.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from harness.errors import Code, HarnessError
from harness.oracle.model import load_model

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
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*", "*.gguf", "gguf.json"))
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
