"""A plain Llama with six mistakes, which says what each tap of a faulty engine holds, and where it is wrong first."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional

PROMPT = [5, 9, 14, 3, 8, 21, 4, 17, 6, 33, 12, 40, 77, 101, 130, 2, 60]


@dataclass(frozen=True)
class Fault:
    taps: tuple[str, ...]
    """Where the first divergence is right."""
    first: int
    """First position that is wrong."""
    cause: str
    """What a cause that is right has among its words, as a regular expression."""


L = "model.layers."
FAULTS = {
    "theta": Fault((L + "0.q_rope",), 1, "theta"),
    "eps": Fault((L + "0.input_layernorm",), 0, "eps"),
    "scale": Fault((L + "0.attention",), 1, "softmax scale"),
    "residual": Fault((L + "1.attn_residual", L + "1.post_attention_layernorm"), 0, "residual"),  # no tensor is the sum
    "cache": Fault((L + "0.attention", L + "0.k_cache"), len(PROMPT), "position|cache|slot|histor"),
    "gate_up": Fault((L + "1.mlp.act", L + "1.mlp.gate_proj"), 0, "swapped|exchanged|gate|up"),
}
THETA, EPS, SCALE = 5000.0, 1e-3, 1.25


def taps_of(folder: Path, ids: list[int], num_prompt: int, fault: str = "") -> dict[str, torch.Tensor]:
    """Return [tokens, ...] for each tap of an engine with a fault: the prompt at once, then one token at a time."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: item.double() for name, item in load_file(folder / "model.safetensors").items()}
    size, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    theta = THETA if fault == "theta" else config["rope_parameters"]["rope_theta"]
    eps = EPS if fault == "eps" else config["rms_norm_eps"]
    scale = size**-0.5 * (SCALE if fault == "scale" else 1)
    rows: dict[str, list[torch.Tensor]] = {}
    cache = torch.zeros(config["num_hidden_layers"], 2, len(ids) + 1, kv_heads, size, dtype=torch.float64)

    def keep(tap: str, value: torch.Tensor) -> torch.Tensor:
        rows.setdefault(tap, []).append(value.flatten(1))
        return value

    def product(path: str, x: torch.Tensor) -> torch.Tensor:
        return keep(path, x @ weights[f"{path}.weight"].T)

    def norm(path: str, x: torch.Tensor) -> torch.Tensor:
        return keep(path, x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{path}.weight"])

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].double() / theta ** (torch.arange(0, size, 2).double() / size)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    for first, stop in [(0, num_prompt), *((at, at + 1) for at in range(num_prompt, len(ids)))]:
        positions = torch.arange(first, stop)
        x = keep("model.embed_tokens", weights["model.embed_tokens.weight"][torch.tensor(ids[first:stop])])
        for layer in range(config["num_hidden_layers"]):
            path = f"{L}{layer}."
            h = norm(path + "input_layernorm", x)
            q, k, v = (product(f"{path}self_attn.{name}_proj", h).unflatten(-1, (-1, size)) for name in "qkv")
            q, k = keep(path + "q_rope", rotate(q, positions)), keep(path + "k_rope", rotate(k, positions))
            slots = positions - int(fault == "cache" and first > 0)
            cache[layer, 0, slots], cache[layer, 1, slots] = k, v
            keys, values = (
                part[:stop].repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for part in cache[layer]
            )
            seen = torch.arange(stop)[None] <= positions[:, None]
            context = functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, seen, scale=scale)
            context = keep(path + "attention", context.transpose(0, 1).flatten(1))
            out = product(path + "self_attn.o_proj", context)
            x = keep(path + "attn_residual", out if fault == "residual" and layer == 1 else x + out)
            h = norm(path + "post_attention_layernorm", x)
            gate, up = product(path + "mlp.gate_proj", h), product(path + "mlp.up_proj", h)
            if fault == "gate_up" and layer == 1:  # gate is what holds the product with the weights of gate
                gate, up = up, gate
            x = x + product(path + "mlp.down_proj", keep(path + "mlp.act", functional.silu(gate) * up))
            keep(path + "output", x)
        product("lm_head", norm("model.norm", x))
    return {tap: torch.cat(parts) for tap, parts in rows.items()}
