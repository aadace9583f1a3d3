"""gpt-fast, of the GitHub repository pytorch-labs/gpt-fast: a copy of it on PYTHONPATH is all that it needs."""

import json

import model as gpt_fast
import torch
from safetensors.torch import load_file

DTYPES = ("float32", "bfloat16")


def load(folder, dtype):
    config = json.loads((folder / "config.json").read_text())
    args = gpt_fast.ModelArgs(
        block_size=256, vocab_size=config["vocab_size"], n_layer=config["num_hidden_layers"],
        n_head=config["num_attention_heads"], n_local_heads=config["num_key_value_heads"], dim=config["hidden_size"],
        intermediate_size=config["intermediate_size"], rope_base=config["rope_parameters"]["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )  # fmt: skip
    weights = load_file(folder / "model.safetensors")

    def pairs(weight):
        return weight.unflatten(0, (-1, 2, args.head_dim // 2)).transpose(1, 2).reshape(weight.shape)

    state = {"tok_embeddings.weight": weights["model.embed_tokens.weight"], "norm.weight": weights["model.norm.weight"]}
    state["output.weight"] = weights["lm_head.weight"]
    for at in range(args.n_layer):
        theirs = {
            name.split(".", 3)[3]: item for name, item in weights.items() if name.startswith(f"model.layers.{at}.")
        }
        q, k, v = (theirs[f"self_attn.{name}_proj.weight"] for name in "qkv")
        state[f"layers.{at}.attention.wqkv.weight"] = torch.cat([pairs(q), pairs(k), v])
        state[f"layers.{at}.attention.wo.weight"] = theirs["self_attn.o_proj.weight"]
        for ours, name in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            state[f"layers.{at}.feed_forward.{ours}.weight"] = theirs[f"mlp.{name}_proj.weight"]
        state[f"layers.{at}.attention_norm.weight"] = theirs["input_layernorm.weight"]
        state[f"layers.{at}.ffn_norm.weight"] = theirs["post_attention_layernorm.weight"]
    model = gpt_fast.Transformer(args).to(getattr(torch, dtype)).eval()
    model.load_state_dict(state)
    model.setup_caches(1, 128)
    return model


class Engine:
    def __init__(self, model):
        self.model, self.caches = model, {}

    def step(self, work):
        rows = []
        for request, ids, first in work:
            caches = self.caches.setdefault(request, [self.new_cache() for _ in self.model.layers])
            for layer, cache in zip(self.model.layers, caches):
                layer.attention.kv_cache = cache
            rows.append(self.model(torch.tensor([ids]), torch.arange(first, first + len(ids)))[0, -1])
        return torch.stack(rows)

    def new_cache(self):
        config = self.model.config
        return gpt_fast.KVCache(1, 128, config.n_local_heads, config.head_dim, self.model.output.weight.dtype)

    def finish(self, request):
        del self.caches[request]


# mistakes
from types import MethodType, SimpleNamespace

from torch.nn import functional
from truth import EPS, SCALE, THETA


def open_engine(folder, dtype, fault):
    gpt_fast.F = functional
    gpt_fast.KVCache.update = UPDATE
    model = load(folder, dtype)
    if fault == "theta":
        model.freqs_cis = gpt_fast.precompute_freqs_cis(256, model.config.head_dim, THETA, model.output.weight.dtype)
    if fault == "eps":
        for module in model.modules():
            if isinstance(module, gpt_fast.RMSNorm):
                module.eps = EPS
    if fault == "scale":
        gpt_fast.F = SimpleNamespace(
            silu=functional.silu,
            scaled_dot_product_attention=lambda q, k, v, **others: functional.scaled_dot_product_attention(
                q, k, v, **others, scale=q.shape[-1] ** -0.5 * SCALE
            ),
        )
    if fault == "residual":
        model.layers[1].forward = MethodType(without_residual, model.layers[1])
    if fault == "cache":
        gpt_fast.KVCache.update = lambda cache, at, k, v: UPDATE(cache, at - int(len(at) == 1 and at > 0), k, v)
    if fault == "gate_up":
        mlp = model.layers[1].feed_forward
        mlp.w1, mlp.w3 = mlp.w3, mlp.w1
    return Engine(model)


UPDATE = gpt_fast.KVCache.update


def without_residual(self, x, input_pos, freqs_cis, mask):
    h = self.attention(self.attention_norm(x), freqs_cis, mask, input_pos)
    return h + self.feed_forward(self.ffn_norm(h))
