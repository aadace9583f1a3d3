"""A small torch engine with the conventions of vLLM's modules, for the page on torch engines and for tests.

Fused projections that return (output, bias), a residual stream that norms update in place, one rotary embedding for all
layers that works in place, a paged cache whose keys lie in an order of their own, padded steps.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

BLOCK = 4


class RMSNorm(nn.Module):
    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x, residual=None):
        if residual is None:
            return self._norm(x)
        residual.add_(x)
        return x.copy_(self._norm(residual)), residual

    def _norm(self, x):
        fine = x.float()
        return self.weight * (fine * torch.rsqrt(fine.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Linear(nn.Module):
    def __init__(self, weight, bias=None):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x):
        return functional.linear(x, self.weight, self.bias), None


class Rotary(nn.Module):
    """In place, and the same object in every layer."""

    def __init__(self, head_dim, theta):
        super().__init__()
        self.inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        self.head_dim = head_dim

    def forward(self, positions, q, k):
        angles = (positions[:, None].float() * self.inv_freq).repeat(1, 2)[:, None]
        for x in (q, k):
            heads = x.view(len(x), -1, self.head_dim)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            half = torch.cat([-heads[..., self.head_dim // 2 :], heads[..., : self.head_dim // 2]], dim=-1)
            heads.copy_(heads * cos + half * sin)
        return q, k


class Attention(nn.Module):
    """Keys and values of a block lie by head and element, then by slot."""

    def __init__(self, num_kv_heads, head_dim, num_blocks, dtype):
        super().__init__()
        self.shape = num_kv_heads, head_dim
        self.cache = torch.zeros(2, num_blocks, num_kv_heads, head_dim, BLOCK, dtype=dtype)

    def store(self, part, rows, slots):
        self.cache[part][slots // BLOCK, :, :, slots % BLOCK] = rows.view(-1, *self.shape).to(self.cache.dtype)

    def forward(self, q, k, v, batch):
        real = batch["slots"] >= 0
        for part, rows in enumerate((k, v)):
            self.store(part, rows[real], batch["slots"][real])
        context = torch.zeros_like(q)
        for rows, table in zip(batch["rows"], batch["tables"], strict=True):
            slots = torch.tensor(table)
            keys, values = (self.cache[part][slots // BLOCK, :, :, slots % BLOCK] for part in (0, 1))
            query = q[rows].view(len(rows), -1, self.shape[1])
            mask = torch.arange(len(table))[None] <= batch["positions"][rows][:, None]
            out = functional.scaled_dot_product_attention(
                query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=mask, enable_gqa=True
            )
            context[rows] = out.transpose(0, 1).flatten(1)
        return context


class SiluAndMul(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up


class Layer(nn.Module):
    def __init__(self, weights, config, rotary, dtype):
        super().__init__()
        get = weights.get
        qkv = [f"self_attn.{name}_proj" for name in "qkv"]
        bias = torch.cat([weights[f"{name}.bias"] for name in qkv]) if f"{qkv[0]}.bias" in weights else None
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        self.kv_width = config["num_key_value_heads"] * head_dim
        self.input_layernorm = RMSNorm(get("input_layernorm.weight"), config["rms_norm_eps"])
        self.qkv_proj = Linear(torch.cat([weights[f"{name}.weight"] for name in qkv]), bias)
        self.rotary = rotary
        self.attn = Attention(config["num_key_value_heads"], head_dim, 64, dtype)
        self.o_proj = Linear(get("self_attn.o_proj.weight"))
        self.post_attention_layernorm = RMSNorm(get("post_attention_layernorm.weight"), config["rms_norm_eps"])
        self.gate_up_proj = Linear(torch.cat([weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"]]))
        self.act = SiluAndMul()
        self.down_proj = Linear(get("mlp.down_proj.weight"))

    def forward(self, x, residual, batch):
        if residual is None:
            residual = x.clone()
            x = self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        qkv, _ = self.qkv_proj(x)
        q, k, v = qkv.split([qkv.shape[1] - 2 * self.kv_width, self.kv_width, self.kv_width], dim=-1)
        q, k = self.rotary(batch["positions"], q.contiguous(), k.contiguous())
        x, _ = self.o_proj(self.attn(q, k, v.contiguous(), batch))
        x, residual = self.post_attention_layernorm(x, residual)
        x, _ = self.down_proj(self.act(self.gate_up_proj(x)[0]))
        return x, residual


class FusedModel(nn.Module):
    def __init__(self, folder, dtype):
        super().__init__()
        self.config = json.loads((Path(folder) / "config.json").read_text())
        files = sorted(Path(folder).glob("*.safetensors"))
        weights = {name: x.to(dtype) for file in files for name, x in load_file(file).items()}
        rope = self.config.get("rope_parameters") or self.config
        heads = self.config["num_attention_heads"]
        rotary = Rotary(self.config.get("head_dim") or self.config["hidden_size"] // heads, rope["rope_theta"])
        self.embed = nn.Embedding.from_pretrained(weights["model.embed_tokens.weight"])
        self.layers = nn.ModuleList()
        for at in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{at}."
            layer_weights = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
            self.layers.append(Layer(layer_weights, self.config, rotary, dtype))
        self.norm = RMSNorm(weights["model.norm.weight"], self.config["rms_norm_eps"])
        self.head = Linear(weights.get("lm_head.weight", weights["model.embed_tokens.weight"]))

    def forward(self, token_ids, batch):
        x, residual = self.embed(token_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        x, _ = self.norm(x, residual)
        return self.head(x[batch["sampled"]])[0]


class FusedEngine:
    """Steps of requests, with a row of padding after them; blocks are handed out in no order."""

    def __init__(self, folder, dtype=torch.float32):
        self.model = FusedModel(folder, dtype).eval()
        self.free = [block * 37 % 64 for block in range(64)]
        self.slots = {}

    @torch.no_grad()
    def step(self, work):
        """Compute [(request, tokens, first position)] and return the logits of each one's last row."""
        rows, ids, positions, slots, tables = [], [], [], [], []
        for request, tokens, first in work:
            table = self.slots.setdefault(request, [])
            for position in range(first, first + len(tokens)):
                table.append(table[-1] + 1 if position % BLOCK else self.free.pop() * BLOCK)
            rows.append(list(range(len(ids), len(ids) + len(tokens))))
            ids, positions, slots = ids + tokens, [*positions, *range(first, len(table))], slots + table[first:]
            tables.append(list(table))
        batch = {"rows": rows, "tables": tables, "sampled": [request_rows[-1] for request_rows in rows]}
        batch |= {"positions": torch.tensor([*positions, 0]), "slots": torch.tensor([*slots, -1])}
        return self.model(torch.tensor([*ids, 0]), batch)
