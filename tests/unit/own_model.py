"""A decoder that somebody wrote for themselves: Qwen3's mathematics under names of their own, with room for bugs."""

import json
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

NAMES = {
    "tok": "model.embed_tokens",
    "blocks.*": "model.layers.*",
    "blocks.*.ln1": "model.layers.*.input_layernorm",
    "blocks.*.attn": "model.layers.*.self_attn",
    "blocks.*.attn.wq": "model.layers.*.self_attn.q_proj",
    "blocks.*.attn.wk": "model.layers.*.self_attn.k_proj",
    "blocks.*.attn.wv": "model.layers.*.self_attn.v_proj",
    "blocks.*.attn.wo": "model.layers.*.self_attn.o_proj",
    "blocks.*.attn.qn": "model.layers.*.self_attn.q_norm",
    "blocks.*.attn.kn": "model.layers.*.self_attn.k_norm",
    "blocks.*.attn.rope:0": "model.layers.*.q_rope",
    "blocks.*.attn.rope:1": "model.layers.*.k_rope",
    "blocks.*.ln2": "model.layers.*.post_attention_layernorm",
    "blocks.*.mlp.w1": "model.layers.*.mlp.gate_proj",
    "blocks.*.mlp.w2": "model.layers.*.mlp.down_proj",
    "blocks.*.mlp.w3": "model.layers.*.mlp.up_proj",
    "ln": "model.norm",
    "head": "lm_head",
}
_LOADED = {
    **{theirs: ours for theirs, ours in NAMES.items() if ":" not in theirs},
    "blocks.*.mlp": "model.layers.*.mlp",
}


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Rope(nn.Module):
    def __init__(self, dim, theta):
        super().__init__()
        self.dim, self.theta, self.offset = dim, theta, 0

    def forward(self, q, k, positions):
        angles = (positions + self.offset)[:, None] * (1 / self.theta ** (torch.arange(0, self.dim, 2) / self.dim))
        cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
        return tuple(
            x * cos + torch.cat((-x[..., self.dim // 2 :], x[..., : self.dim // 2]), dim=-1) * sin for x in (q, k)
        )


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, size = config["head_dim"], config["hidden_size"]
        q, kv = (config[f"num_{kind}_heads"] * self.dim for kind in ("attention", "key_value"))
        self.wq, self.wk, self.wv = (nn.Linear(size, out, bias=False) for out in (q, kv, kv))
        self.wo = nn.Linear(q, size, bias=False)
        self.qn, self.kn = (Norm(self.dim, config["rms_norm_eps"]) for _ in range(2))
        self.rope = Rope(self.dim, config["rope_parameters"]["rope_theta"])
        self.scale = self.dim**-0.5

    def forward(self, x, positions, cache):
        q, k, v = (f(x).unflatten(-1, (-1, self.dim)).transpose(0, 1) for f in (self.wq, self.wk, self.wv))
        q, k = self.rope(self.qn(q), self.kn(k), positions)
        if cache is not None:
            k, v = (torch.cat((old, new), dim=1) for old, new in zip(cache, (k, v), strict=True))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
        return self.wo(out.transpose(0, 1).flatten(1)), (k, v)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.w1, self.w3, self.w2 = (nn.Linear(*s, bias=False) for s in ((size, inner), (size, inner), (inner, size)))

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln1, self.ln2 = (Norm(config["hidden_size"], config["rms_norm_eps"]) for _ in range(2))
        self.attn, self.mlp = Attention(config), MLP(config)

    def forward(self, x, positions, cache):
        out, cache = self.attn(self.ln1(x), positions, cache)
        x = x + out
        return x + self.mlp(self.ln2(x)), cache


class OwnModel(nn.Module):
    """Takes tokens [1, T] and returns logits [1, T, V]."""

    def __init__(self, config):
        super().__init__()
        self.tok = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.blocks = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.ln = Norm(config["hidden_size"], config["rms_norm_eps"])
        self.head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(self, tokens):
        return self.run(tokens, None)[0]

    def run(self, tokens, cache):
        caches = [None] * len(self.blocks) if cache is None else cache
        start = 0 if cache is None else cache[0][0].shape[1]
        x, kept = self.tok(tokens[0]), []
        for block, layer_cache in zip(self.blocks, caches, strict=True):
            x, layer_cache = block(x, torch.arange(start, start + len(x)), layer_cache)
            kept.append(layer_cache)
        return self.head(self.ln(x))[None], kept


class CachedModel(OwnModel):
    """The same with a cache that it takes and returns."""

    def forward(self, tokens, cache=None):
        return self.run(tokens, cache)


def load(folder: Path, kind: type[OwnModel] = OwnModel, dtype: torch.dtype = torch.float32) -> OwnModel:
    """Load the weights of an embedded checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    model = kind(config)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[_checkpoint_name(name, tensors)])
    return model.to(dtype)


def _checkpoint_name(name: str, tensors: object) -> str:
    path, _, parameter = name.rpartition(".")
    number = next((part for part in path.split(".") if part.isdigit()), "")
    ours = _LOADED[path.replace(f".{number}", ".*", 1) if number else path].replace("*", number)
    return f"{ours}.{parameter}" if f"{ours}.{parameter}" in tensors else "model.embed_tokens.weight"  # a tied head
