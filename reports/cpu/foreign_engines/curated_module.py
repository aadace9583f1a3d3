"""curated-transformers, its model as it is, whose cache grows: `pip install curated-transformers curated-tokenizers catalogue`.

Its rotary has a base of 10,000 whatever the checkpoint says.
"""

import json

import torch
from curated_transformers.layers import AttentionMask
from curated_transformers.models import LlamaCausalLM
from safetensors.torch import load_file

DTYPES = ("float32", "bfloat16")


def load(folder, dtype):
    model = LlamaCausalLM.from_hf_config(hf_config=json.loads((folder / "config.json").read_text()))
    model.load_state_dict(LlamaCausalLM.state_dict_from_hf(load_file(folder / "model.safetensors")))
    return model.to(getattr(torch, dtype)).eval()


class Engine:
    def __init__(self, model):
        self.model, self.caches = model, {}

    def step(self, work):
        rows = []
        for request, ids, first in work:
            mask = AttentionMask(torch.ones(1, first + len(ids), dtype=torch.bool))
            output = self.model(torch.tensor([ids]), mask, cache=self.caches.get(request), store_cache=True)
            self.caches[request] = output.cache
            rows.append(output.logits[0, -1])
        return torch.stack(rows)

    def finish(self, request):
        del self.caches[request]


# mistakes
import math
from types import MethodType, SimpleNamespace

from curated_transformers.layers import QueryKeyRotaryEmbeddings, RMSNorm, attention
from truth import EPS, SCALE, THETA


def open_engine(folder, dtype, fault):
    attention.math = SimpleNamespace(sqrt=lambda size: math.sqrt(size) / (SCALE if fault == "scale" else 1))
    attention.torch = Torch() if fault == "cache" else torch
    model = load(folder, dtype)
    layers = model.decoder.layers
    for module in model.modules():
        if fault == "eps" and isinstance(module, RMSNorm):
            module.eps = EPS
    for layer in layers:
        if fault == "theta":
            rotary = QueryKeyRotaryEmbeddings(fraction=1.0, base=THETA, head_width=16)
            layer.mha.rotary_embeds = rotary.to(model.output_embeddings.weight.dtype)
    if fault == "residual":
        layers[1].forward = MethodType(without_residual, layers[1])
    if fault == "gate_up":
        mlp = layers[1].ffn
        mlp.gate, mlp.intermediate = mlp.intermediate, mlp.gate
    return Engine(model)


def without_residual(self, x, mask, **others):
    h, cache = self.mha(self.attn_input_layer_norm(x), mask, use_causal_mask=True, **others)
    return h + self.ffn(self.ffn_input_layer_norm(h)), cache


class Torch:
    """torch, whose `cat` puts the row of a token of decode into the place of the one before."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def cat(self, parts, dim):
        old, new = parts
        if new.shape[dim] > 1:
            return torch.cat(parts, dim=dim)
        return torch.cat([old[..., :-1, :], new, torch.zeros_like(new)], dim=dim)
