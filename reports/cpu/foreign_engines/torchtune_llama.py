"""torchtune's Llama 3 with its own cache: `pip install torchtune==0.6.1 torchao==0.10.0`."""

import json

import torch
from safetensors.torch import load_file
from torchtune.models.convert_weights import hf_to_tune
from torchtune.models.llama3 import llama3

DTYPES = ("float32", "bfloat16")
ROOM = 128


def load(folder, dtype, **changes):
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    model = llama3(**{
        "vocab_size": config["vocab_size"], "num_layers": config["num_hidden_layers"], "num_heads": heads,
        "num_kv_heads": kv_heads, "embed_dim": dim, "max_seq_len": ROOM, "intermediate_dim": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"], "rope_base": config["rope_parameters"]["rope_theta"], **changes,
    })  # fmt: skip
    model.load_state_dict(hf_to_tune(load_file(folder / "model.safetensors"), heads, kv_heads, dim))
    return model.to(getattr(torch, dtype)).eval()


class Engine:
    def __init__(self, model, dtype):
        self.model, self.dtype, self.caches = model, dtype, {}
        self.mask = torch.ones(ROOM, ROOM, dtype=torch.bool).tril()

    def step(self, work):
        rows = []
        for request, ids, first in work:
            for layer in self.model.layers:
                layer.attn.kv_cache, layer.attn.cache_enabled = None, False
            if request in self.caches:
                for layer, cache in zip(self.model.layers, self.caches[request]):
                    layer.attn.kv_cache, layer.attn.cache_enabled = cache, True
            else:
                self.model.setup_caches(1, self.dtype, decoder_max_seq_len=ROOM)
                self.caches[request] = [layer.attn.kv_cache for layer in self.model.layers]
            at = torch.arange(first, first + len(ids))
            rows.append(self.model(torch.tensor([ids]), mask=self.mask[None, at], input_pos=at[None])[0, -1])
        return torch.stack(rows)

    def finish(self, request):
        del self.caches[request]


# mistakes
from torchtune.modules import KVCache, RMSNorm
from truth import EPS, SCALE, THETA

UPDATE = KVCache.update


def open_engine(folder, dtype, fault):
    KVCache.update = UPDATE
    model = load(folder, dtype, **({"rope_base": THETA} if fault == "theta" else {}))
    if fault == "eps":
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.eps = EPS
    if fault == "scale":
        for layer in model.layers:
            sound = layer.attn._attention_call
            layer.attn._attention_call = lambda q, *a, sound=sound, **k: sound(q * SCALE, *a, **k)
    if fault == "residual":
        layer = model.layers[1]

        def forward(x, *, mask=None, input_pos=None, **_):
            h = layer.sa_norm(x)
            a = layer.attn(h, h, mask=mask, input_pos=input_pos)
            return a + layer.mlp(layer.mlp_norm(a))

        layer.forward = forward
    if fault == "cache":

        def update(cache, k, v):
            low = int(k.shape[2] == 1 and cache.cache_pos[0] > 0)
            cache.cache_pos.sub_(low)
            out = UPDATE(cache, k, v)
            cache.cache_pos.add_(low)
            return out

        KVCache.update = update
    if fault == "gate_up":
        mlp = model.layers[1].mlp
        mlp.w1, mlp.w3 = mlp.w3, mlp.w1
    return Engine(model, getattr(torch, dtype))
