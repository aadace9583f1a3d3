"""ExecuTorch's Llama, the model that its runtime is exported from: `pip install --no-deps executorch` is all it needs."""

import json

import torch
from executorch.examples.models.llama import attention as et
from executorch.examples.models.llama.llama_transformer import construct_transformer
from executorch.examples.models.llama.model_args import ModelArgs
from safetensors.torch import load_file

DTYPES = ("float32", "bfloat16", "float16")
NAMES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "model.": "", "embed_tokens": "tok_embeddings", "lm_head": "output",
}  # fmt: skip


def load(folder, dtype, **changes):
    config = json.loads((folder / "config.json").read_text())
    settings = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"], "vocab_size": config["vocab_size"], "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"], "norm_eps": config["rms_norm_eps"], "use_hf_rope": True,
        "rope_theta": config["rope_parameters"]["rope_theta"], "use_kv_cache": True, "max_context_len": 256,
    }  # fmt: skip
    model = construct_transformer(ModelArgs(**settings | changes)).to(getattr(torch, dtype)).eval()
    state = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        state[name] = weight
    model.load_state_dict(state, strict=False)
    return model


class Engine:
    def __init__(self, model):
        self.model, self.caches = model, {}

    def step(self, work):
        rows = []
        for request, ids, first in work:
            new = [layer.attention.kv_cache for layer in self.model.layers]
            caches = self.caches.setdefault(
                request, [(torch.zeros_like(c.k_cache), torch.zeros_like(c.v_cache)) for c in new]
            )
            for cache, kept in zip(new, caches):
                cache.k_cache, cache.v_cache = kept
            rows.append(self.model(torch.tensor([ids]), {"input_pos": torch.arange(first, first + len(ids))})[0])
        return torch.stack(rows)

    def finish(self, request):
        del self.caches[request]


# mistakes
from types import MethodType, SimpleNamespace

from executorch.examples.models.llama.norm import RMSNorm
from torch.nn import functional
from truth import EPS, SCALE, THETA

UPDATE = et.KVCache.update


def open_engine(folder, dtype, fault):
    et.F, et.KVCache.update = functional, UPDATE
    model = load(folder, dtype, **({"rope_theta": THETA} if fault == "theta" else {}))
    if fault == "eps":
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.eps = EPS
    if fault == "scale":
        et.F = SimpleNamespace(
            scaled_dot_product_attention=lambda q, k, v, **others: functional.scaled_dot_product_attention(
                q, k, v, **others, scale=q.shape[-1] ** -0.5 * SCALE
            )
        )
    if fault == "residual":
        model.layers[1]._apply_attention_residual = MethodType(lambda self, x, branch: branch, model.layers[1])
    if fault == "cache":
        et.KVCache.update = lambda cache, at, k, v: UPDATE(cache, at - int(len(at) == 1 and at > 0), k, v)
    if fault == "gate_up":
        mlp = model.layers[1].feed_forward
        mlp.w1, mlp.w3 = mlp.w3, mlp.w1
    return Engine(model)
