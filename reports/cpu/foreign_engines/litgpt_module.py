"""litgpt, its module as it is, with its cache: `pip install litgpt`."""

import json

import torch
from litgpt import GPT, Config
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from safetensors.torch import load_file

DTYPES = ("float32", "bfloat16")


def load(folder, dtype):
    hf = json.loads((folder / "config.json").read_text())
    config = Config(
        block_size=128, n_layer=hf["num_hidden_layers"], n_embd=hf["hidden_size"], rotary_percentage=1.0,
        n_head=hf["num_attention_heads"], n_query_groups=hf["num_key_value_heads"], bias=False,
        parallel_residual=False, norm_class_name="RMSNorm", norm_eps=hf["rms_norm_eps"], mlp_class_name="LLaMAMLP",
        intermediate_size=hf["intermediate_size"], rope_base=hf["rope_parameters"]["rope_theta"],
        padded_vocab_size=hf["vocab_size"], vocab_size=hf["vocab_size"],
    )  # fmt: skip
    state = {}
    copy_weights_hf_llama(config, {}, state, load_file(folder / "model.safetensors"))
    model = GPT(config).to(getattr(torch, dtype)).eval()
    model.load_state_dict(state)
    return model


class Engine:
    def __init__(self, model):
        self.model, self.caches = model, {}

    def step(self, work):
        rows = []
        for request, ids, first in work:
            if request not in self.caches:
                self.model.set_kv_cache(1, dtype=self.model.lm_head.weight.dtype)
                self.caches[request] = [block.attn.kv_cache for block in self.model.transformer.h]
            for block, cache in zip(self.model.transformer.h, self.caches[request]):
                block.attn.kv_cache = cache
            rows.append(self.model(torch.tensor([ids]), torch.arange(first, first + len(ids)))[0, -1])
        return torch.stack(rows)

    def finish(self, request):
        del self.caches[request]


# mistakes
from types import MethodType

from litgpt.model import KVCache, RMSNorm
from truth import EPS, SCALE, THETA

FORWARD = KVCache.forward


def open_engine(folder, dtype, fault):
    KVCache.forward = FORWARD
    model = load(folder, dtype)
    if fault == "theta":
        model.config.rope_base = THETA
        model.reset_parameters()
    if fault == "eps":
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.eps = EPS
    if fault == "scale":
        model.config.attention_scores_scalar = 16 / SCALE**2
    if fault == "residual":
        model.transformer.h[1].forward = MethodType(without_residual, model.transformer.h[1])
    if fault == "cache":
        KVCache.forward = lambda self, at, k, v: FORWARD(self, at - int(k.shape[2] == 1 and at > 0), k, v)
    if fault == "gate_up":
        mlp = model.transformer.h[1].mlp
        mlp.fc_1, mlp.fc_2 = mlp.fc_2, mlp.fc_1
    return Engine(model)


def without_residual(self, x, *others):
    x = self.attn(self.norm_1(x), *others)
    return self.mlp(self.norm_2(x)) + x
