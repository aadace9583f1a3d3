"""What llama.cpp computes of a file of Llama, Qwen2 or Qwen3, by the package gguf's reader: no line of the harness.

Source: `load_hparams` and the graphs of these architectures in llama.cpp, `ggml_rope_ext` in ggml.
"""

import math
from pathlib import Path

import gguf
import numpy as np
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu


class RefusedError(Exception):
    """llama.cpp does not load the file."""


def logits(path: Path, ids: list[int]) -> torch.Tensor:
    """Return the logits of all tokens, [tokens, vocabulary], in float64."""
    reader = gguf.GGUFReader(path)
    arch = reader.get_field("general.architecture").contents()
    settings = {
        name.removeprefix(f"{arch}."): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(arch)
    }
    weights = {
        tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))).double()
        for tensor in reader.tensors
    }
    unused = set(weights)

    def weight(name: str) -> torch.Tensor | None:
        unused.discard(name)
        return weights.get(name)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        has_bias = arch == "llama" or (arch == "qwen2" and name[-1] in "qkv")
        bias = weight(f"{name}.bias") if has_bias else None
        out = x @ weight(f"{name}.weight").T
        return out if bias is None else out + bias

    eps, heads = settings["attention.layer_norm_rms_epsilon"], settings["attention.head_count"]
    kv_heads = settings.get("attention.head_count_kv", heads)
    own_dim = settings["embedding_length"] // heads
    dim, value_dim = (settings.get(f"attention.{side}_length", own_dim) for side in ("key", "value"))
    cos, sin = _rotation(settings, len(ids), dim, weight("rope_freqs.weight") if arch == "llama" else None)
    if arch == "llama" and settings.get("rope.dimension_count", dim) != dim:
        raise RefusedError("invalid n_rot")

    def rotated(x: torch.Tensor) -> torch.Tensor:
        n_rot = 2 * cos.shape[-1]
        turned, rest = x[..., :n_rot], x[..., n_rot:]
        one, two = (turned[..., ::2], turned[..., 1::2]) if arch == "llama" else turned.chunk(2, -1)
        pair = (one * cos - two * sin, two * cos + one * sin)
        turned = torch.stack(pair, -1).flatten(-2) if arch == "llama" else torch.cat(pair, -1)
        return torch.cat([turned, rest], -1)

    embedding = weight("token_embd.weight")
    x = embedding[ids]
    for layer in range(settings["block_count"]):
        at = f"blk.{layer}"
        h = rms_norm(x, x.shape[-1:], weight(f"{at}.attn_norm.weight"), eps)
        q, k, v = (linear(h, f"{at}.attn_{side}") for side in "qkv")
        q, k = q.unflatten(-1, (heads, dim)).transpose(0, 1), k.unflatten(-1, (kv_heads, dim)).transpose(0, 1)
        v = v.unflatten(-1, (kv_heads, value_dim)).transpose(0, 1)
        if arch == "qwen3":
            q = rms_norm(q, q.shape[-1:], weight(f"{at}.attn_q_norm.weight"), eps)
            k = rms_norm(k, k.shape[-1:], weight(f"{at}.attn_k_norm.weight"), eps)
        out = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + linear(out.transpose(0, 1).flatten(1), f"{at}.attn_output")
        h = rms_norm(x, x.shape[-1:], weight(f"{at}.ffn_norm.weight"), eps)
        x = x + linear(silu(linear(h, f"{at}.ffn_gate")) * linear(h, f"{at}.ffn_up"), f"{at}.ffn_down")
    x = rms_norm(x, x.shape[-1:], weight("output_norm.weight"), eps)
    head = weight("output.weight")
    if unused:
        raise RefusedError(f"unused tensors: {unused}")
    return x @ (embedding if head is None else head).T


def _rotation(settings: dict, count: int, dim: int, factors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of each position and pair, [tokens, pairs]."""
    base, n_rot = settings.get("rope.freq_base", 10000.0), settings.get("rope.dimension_count", dim)
    kind = settings.get("rope.scaling.type", "linear")
    factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear", 0.0)) or 1.0
    pairs = torch.arange(n_rot // 2, dtype=torch.float64)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * base ** (-2 * pairs / n_rot)
    if factors is not None:
        angles = angles / factors
    scale = settings.get("rope.scaling.attn_factor", 1.0)
    if kind == "linear":
        angles = angles / factor
    elif kind == "yarn":
        length = settings.get("rope.scaling.original_context_length", settings["context_length"])
        ends = [
            n_rot * math.log(length / (settings.get(f"rope.scaling.yarn_beta_{name}", beta) * 2 * math.pi))
            / (2 * math.log(base))
            for name, beta in (("fast", 32.0), ("slow", 1.0))
        ]  # fmt: skip
        low, high = max(0, math.floor(ends[0])), min(n_rot - 1, math.ceil(ends[1]))
        mix = 1 - ((pairs - low) / max(0.001, high - low)).clamp(0, 1)
        angles = angles / factor * (1 - mix) + angles * mix
        scale *= 1 + 0.1 * math.log(factor)
    elif kind != "none":
        raise RefusedError(kind)
    return angles.cos() * scale, angles.sin() * scale
