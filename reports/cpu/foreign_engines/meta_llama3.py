"""Meta's own Llama 3, of the GitHub repository meta-llama/llama-models: a copy of it on PYTHONPATH, and `pip install fairscale`.

Its layers are fairscale's of several ranks, here one. Its rotary turns neighbouring pairs as complex numbers.
"""

import json
import tempfile

import torch
from fairscale.nn.model_parallel.initialize import initialize_model_parallel
from models.llama3 import model as llama3
from models.llama3.args import ModelArgs
from safetensors.torch import load_file

DTYPES = ("float32", "bfloat16")


def load(folder, dtype):
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", f"file://{tempfile.mktemp()}", rank=0, world_size=1)
        initialize_model_parallel(1)
    config = json.loads((folder / "config.json").read_text())
    args = ModelArgs(
        dim=config["hidden_size"], n_layers=config["num_hidden_layers"], n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"], vocab_size=config["vocab_size"], multiple_of=16,
        norm_eps=config["rms_norm_eps"], rope_theta=config["rope_parameters"]["rope_theta"], max_batch_size=1,
        max_seq_len=128,
    )  # fmt: skip
    weights = load_file(folder / "model.safetensors")

    def pairs(weight):
        return weight.unflatten(0, (-1, 2, config["head_dim"] // 2)).transpose(1, 2).reshape(weight.shape)

    state = {"tok_embeddings.weight": weights["model.embed_tokens.weight"], "norm.weight": weights["model.norm.weight"]}
    state["output.weight"] = weights["lm_head.weight"]
    for at in range(args.n_layers):
        hf, path = f"model.layers.{at}.", f"layers.{at}."
        for name in "qkvo":
            weight = weights[f"{hf}self_attn.{name}_proj.weight"]
            state[f"{path}attention.w{name}.weight"] = pairs(weight) if name in "qk" else weight
        for ours, name in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            state[f"{path}feed_forward.{ours}.weight"] = weights[f"{hf}mlp.{name}_proj.weight"]
        state[f"{path}attention_norm.weight"] = weights[f"{hf}input_layernorm.weight"]
        state[f"{path}ffn_norm.weight"] = weights[f"{hf}post_attention_layernorm.weight"]
    model = llama3.Transformer(args)
    model.load_state_dict(state)
    return model.to(getattr(torch, dtype)).eval()


class Engine:
    def __init__(self, model):
        self.model, self.caches = model, {}

    def step(self, work):
        rows = []
        for request, ids, first in work:
            layers = [layer.attention for layer in self.model.layers]
            caches = self.caches.setdefault(request, [torch.zeros(2, *layer.cache_k.shape) for layer in layers])
            for layer, (keys, values) in zip(layers, caches):
                layer.cache_k, layer.cache_v = keys, values
            rows.append(self.model(torch.tensor([ids]), first)[0, -1])
            self.caches[request] = [(layer.cache_k, layer.cache_v) for layer in layers]  # in the model's dtype now
        return torch.stack(rows)

    def finish(self, request):
        del self.caches[request]


# mistakes
from types import MethodType, SimpleNamespace

from truth import EPS, SCALE, THETA

SQRT = llama3.math.sqrt


def open_engine(folder, dtype, fault):
    llama3.math = SimpleNamespace(sqrt=lambda size: SQRT(size) / (SCALE if fault == "scale" else 1))
    model = load(folder, dtype)
    if fault == "theta":
        model.freqs_cis = llama3.precompute_freqs_cis(16, 256, THETA)
    for module in model.modules():
        if fault == "eps" and isinstance(module, llama3.RMSNorm):
            module.eps = EPS
        if fault == "cache" and isinstance(module, llama3.Attention):
            module.forward = MethodType(into_the_slot_before, module)
    if fault == "residual":
        model.layers[1].forward = MethodType(without_residual, model.layers[1])
    if fault == "gate_up":
        mlp = model.layers[1].feed_forward
        mlp.w1, mlp.w3 = mlp.w3, mlp.w1
    return Engine(model)


def without_residual(self, x, *others):
    h = self.attention(self.attention_norm(x), *others)
    return h + self.feed_forward(self.ffn_norm(h))


class Shifted:
    """A cache that writes a token of decode one slot early."""

    def __init__(self, cache):
        self.cache = cache

    def to(self, x):
        self.cache = self.cache.to(x)
        return self

    def __getitem__(self, at):
        return self.cache[at]

    def __setitem__(self, at, rows):
        requests, slots = at
        early = int(rows.shape[1] == 1 and slots.start > 0)
        self.cache[requests, slots.start - early : slots.stop - early] = rows


def into_the_slot_before(self, *args):
    self.cache_k, self.cache_v = Shifted(self.cache_k), Shifted(self.cache_v)
    result = type(self).forward(self, *args)
    self.cache_k, self.cache_v = self.cache_k.cache, self.cache_v.cache
    return result
