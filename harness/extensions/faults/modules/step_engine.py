"""A step engine for GPT-NeoX: fused q, k, v by head, partial rotary, parallel residuals, a paged cache.

It names no tap and no module as HuggingFace does. `wrong` switches one mistake on; None is the sound engine. `style`
chooses between equal ways to compute.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

BLOCK = 4


class Product(nn.Module):
    def __init__(self, weights, name, *, transposed=False):
        super().__init__()
        self.w, self.b, self.transposed = weights[f"{name}.weight"], weights.get(f"{name}.bias"), transposed
        if transposed:
            self.w = self.w.T.contiguous()

    def forward(self, x):
        if not self.transposed:
            return functional.linear(x, self.w, self.b)
        return x @ self.w if self.b is None else torch.addmm(self.b, x, self.w)


class PlainNorm(nn.Module):
    def __init__(self, weights, name, eps, *, by_hand=False):
        super().__init__()
        self.w, self.b, self.eps, self.by_hand = weights[f"{name}.weight"], weights[f"{name}.bias"], eps, by_hand

    def forward(self, x):
        if not self.by_hand:
            return functional.layer_norm(x, x.shape[-1:], self.w, self.b, self.eps)
        fine = x.float()
        fine = fine - fine.mean(-1, keepdim=True)
        return (fine / (fine.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.w.float() + self.b.float()).to(
            x.dtype
        )


class PlainAttention(nn.Module):
    """Rotates, stores and attends. Pages are [blocks, slot, head, size]."""

    def __init__(self, engine, layer, heads, size, turned):
        super().__init__()
        self.engine, self.layer, self.heads, self.size, self.turned = engine, layer, heads, size, turned
        self.pages = torch.zeros(2, 96, BLOCK, heads, size, dtype=engine.cache_dtype)

    def rotate(self, x, positions):
        turned = self.size if self.engine.wrong == "whole-head" else self.turned
        angles = positions[:, None].float() / 1e4 ** (torch.arange(0, turned, 2).float() / turned)
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        a, b, rest = x[..., : turned // 2], x[..., turned // 2 : turned], x[..., turned:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def forward(self, qkv, batch):
        wrong = self.engine.wrong
        if wrong == "fused-by-part":
            q, k, v = qkv.unflatten(-1, (3, self.heads, self.size)).unbind(1)
        else:
            q, k, v = qkv.unflatten(-1, (self.heads, 3, self.size)).unbind(2)
        turn = batch["positions"]
        if wrong == "chunk-positions":
            turn = torch.cat([torch.arange(len(rows)) if len(rows) > 1 else turn[rows] for rows in batch["rows"]])
        q, k = self.rotate(q, turn - (wrong == "decode-position") * batch["decode"]), self.rotate(k, turn)
        slots = batch["slots"].clone()
        if wrong == "block-boundary":
            slots = torch.where((batch["positions"] == 2 * BLOCK) & (slots > 0), batch["before"], slots)
        pages = self.engine.layers[0].attention.pages if wrong == "pages-of-layer-0" and self.layer else self.pages
        stored = v.roll(1, 1) if wrong == "value-heads-rolled" else v
        for part, rows in enumerate((k, stored)):
            pages[part].view(-1, self.heads, self.size)[slots] = rows.to(pages.dtype)
        out = torch.empty_like(q)
        for at, (rows, table) in enumerate(zip(batch["rows"], batch["tables"], strict=True)):
            if wrong == "table-of-the-first" and at:
                table = (batch["tables"][0] + table)[: len(table)]
            keys, values = (
                pages[part].view(-1, self.heads, self.size)[torch.tensor(table)].to(q.dtype) for part in (0, 1)
            )
            seen = torch.arange(len(table))[None] <= batch["positions"][rows][:, None]
            if wrong == "strict-mask":
                seen = seen & (
                    (torch.arange(len(table))[None] < batch["positions"][rows][:, None])
                    | (torch.arange(len(table)) == 0)
                )
            scale = 1 / 8 if wrong == "scale" else self.size**-0.5
            out[rows] = self.attend(q[rows], keys, values, seen, scale)
        return out.flatten(1)

    def attend(self, q, k, v, seen, scale):
        if self.engine.style == "eager":
            scores = torch.einsum("thd,khd->htk", q.float() * scale, k.float()).masked_fill(~seen, float("-inf"))
            return torch.einsum("htk,khd->thd", scores.softmax(-1), v.float()).to(q.dtype)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(0, 1)


class PlainLayer(nn.Module):
    def __init__(self, engine, weights, at, config):
        super().__init__()
        by_hand, transposed = engine.style == "by-hand", engine.style == "transposed"
        self.engine = [engine]
        eps = 1e-3 if engine.wrong == "eps" else config["layer_norm_eps"]
        self.ln1, self.ln2 = (
            PlainNorm(weights, "input_layernorm", eps, by_hand=by_hand),
            PlainNorm(weights, "post_attention_layernorm", config["layer_norm_eps"], by_hand=by_hand),
        )
        self.qkv = Product(weights, "attention.query_key_value", transposed=transposed)
        heads = config["num_attention_heads"]
        size = config["hidden_size"] // heads
        self.attention = PlainAttention(engine, at, heads, size, size // 4)
        self.out = Product(weights, "attention.dense", transposed=transposed)
        if engine.wrong == "dense-bias":
            self.out.b = None
        self.up, self.down = (
            Product(weights, "mlp.dense_h_to_4h", transposed=transposed),
            Product(weights, "mlp.dense_4h_to_h", transposed=transposed),
        )

    def forward(self, x, batch):
        attended = self.out(self.attention(self.qkv(self.ln1(x)), batch))
        h = self.ln2(x + attended if self.engine[0].wrong == "sequential" else x)
        approximate = "tanh" if self.engine[0].wrong == "gelu" else "none"
        if self.engine[0].style == "other-order":
            return self.down(functional.gelu(self.up(h), approximate=approximate)) + attended + x
        return x + (attended + self.down(functional.gelu(self.up(h), approximate=approximate)))


class PlainStepEngine:
    rewinds = True

    def __init__(self, folder, dtype, wrong=None, style="sdpa", every_row=False):
        self.wrong, self.style, self.every_row = wrong, style, every_row
        self.cache_dtype = torch.bfloat16 if style == "cache-bfloat16" else dtype
        config = json.loads((Path(folder) / "config.json").read_text())
        weights = {
            name: x.to(dtype) for file in Path(folder).glob("*.safetensors") for name, x in load_file(file).items()
        }
        self.table = nn.Embedding.from_pretrained(weights["gpt_neox.embed_in.weight"])
        self.layers = nn.ModuleList()
        for at in range(config["num_hidden_layers"]):
            prefix = f"gpt_neox.layers.{at}."
            if wrong == "stale-layer" and at == 1:
                prefix = "gpt_neox.layers.0."
            layer_weights = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
            self.layers.append(PlainLayer(self, layer_weights, at, config))
        self.last = PlainNorm(weights, "gpt_neox.final_layer_norm", config["layer_norm_eps"])
        self.head = Product(weights, "lm_head" if "lm_head.weight" in weights else "embed_out")
        if wrong == "final-norm-bias":
            self.last.b = torch.zeros_like(self.last.b)
        if wrong == "head-tied":
            self.head.w = self.table.weight
        if wrong == "head-rolled":
            self.head.w = self.head.w.roll(1, 0)
        self.free = [block * 29 % 95 + 1 for block in range(95)] if style != "in-order" else list(range(95, 0, -1))
        self.blocks, self.lengths = {}, {}

    def slots(self, request, length):
        return [self.blocks[request][p // BLOCK] * BLOCK + p % BLOCK for p in range(length)]

    @torch.no_grad()
    def step(self, work):
        order = sorted(range(len(work)), key=lambda at: -at) if self.style == "reversed" else range(len(work))
        ids, positions, rows, tables, slots, before, decode = [], [], [], [], [], [], []
        for at in range(len(work)):
            request, tokens, first = work[at]
            blocks = self.blocks.setdefault(request, [])
            while len(blocks) * BLOCK < first + len(tokens):
                blocks.append(self.free.pop())
            end = first + len(tokens)
            if self.wrong == "stale-drafts":
                end = max(end, self.lengths.get(request, 0))
            self.lengths[request] = end
            table = self.slots(request, first + len(tokens))
            rows.append(list(range(len(ids), len(ids) + len(tokens))))
            ids, positions = ids + list(tokens), positions + list(range(first, first + len(tokens)))
            slots, before = slots + table[first:], before + ([table[0], *table][first : first + len(tokens)])
            decode += [int(first > 0 and len(tokens) == 1)] * len(tokens)
            tables.append(table)
        del order
        batch = {
            "positions": torch.tensor(positions),
            "slots": torch.tensor(slots),
            "before": torch.tensor(before),
            "rows": rows,
            "tables": tables,
            "decode": torch.tensor(decode),
        }
        x = self.table(torch.tensor(ids))
        for layer in self.layers:
            x = layer(x, batch)
        kept = (
            [row for request_rows in rows for row in request_rows]
            if self.every_row
            else [request_rows[-1] for request_rows in rows]
        )
        if self.wrong == "logits-of-the-row-before":
            kept = [max(0, row - 1) for row in kept]
        return self.head(self.last(x)[kept])

    def finish(self, request):
        self.free += self.blocks.pop(request, [])
        self.lengths.pop(request, None)

    def cached(self, request):
        length = self.lengths[request]
        slots = torch.tensor(self.slots(request, length))
        return {
            at: tuple(layer.attention.pages[part].view(-1, *layer.attention.pages.shape[3:])[slots] for part in (0, 1))
            for at, layer in enumerate(self.layers)
        }
