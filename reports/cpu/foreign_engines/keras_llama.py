"""KerasHub's Llama on Keras with torch, with its cache: `pip install keras keras-hub`, and KERAS_BACKEND=torch."""

import json

import torch
from keras import ops
from keras_hub.models import LlamaBackbone, LlamaCausalLM
from safetensors.torch import load_file

DTYPES = ("float32", "bfloat16")


def load(folder, dtype):
    config = json.loads((folder / "config.json").read_text())
    backbone = LlamaBackbone(
        vocabulary_size=config["vocab_size"], num_layers=config["num_hidden_layers"], dtype=dtype,
        num_query_heads=config["num_attention_heads"], hidden_dim=config["hidden_size"],
        intermediate_dim=config["intermediate_size"], num_key_value_heads=config["num_key_value_heads"],
        rope_max_wavelength=config["rope_parameters"]["rope_theta"], layer_norm_epsilon=config["rms_norm_eps"],
    )  # fmt: skip
    weights = {name: item.float() for name, item in load_file(folder / "model.safetensors").items()}
    embedding, size = backbone.token_embedding, config["head_dim"]
    embedding.embeddings.assign(weights["model.embed_tokens.weight"])
    embedding.reverse_embeddings.assign(weights["lm_head.weight"].T)
    backbone.layer_norm.scale.assign(weights["model.norm.weight"])
    for at, layer in enumerate(backbone.transformer_layers):
        of_layer = {
            name.split(".", 3)[3]: item for name, item in weights.items() if name.startswith(f"model.layers.{at}.")
        }
        attention = layer._self_attention_layer
        for name, dense in (("q", "query"), ("k", "key"), ("v", "value")):
            kernel = of_layer[f"self_attn.{name}_proj.weight"].T.unflatten(1, (-1, size))
            getattr(attention, f"_{dense}_dense").kernel.assign(kernel)
        attention._output_dense.kernel.assign(of_layer["self_attn.o_proj.weight"].T.unflatten(0, (-1, size)))
        for name, dense in (("gate", "gate"), ("up", "intermediate"), ("down", "output")):
            getattr(layer, f"_feedforward_{dense}_dense").kernel.assign(of_layer[f"mlp.{name}_proj.weight"].T)
        layer._self_attention_layernorm.scale.assign(of_layer["input_layernorm.weight"])
        layer._feedforward_layernorm.scale.assign(of_layer["post_attention_layernorm.weight"])
    return LlamaCausalLM(backbone)


class Engine:
    def __init__(self, model):
        self.model, self.caches = model, {}
        attention = model.backbone.transformer_layers[0]._self_attention_layer
        heads, size = attention.num_key_value_heads, attention._key_dense.kernel.shape[-1]
        self.shape = 1, model.backbone.num_layers, 2, 128, heads, size

    def step(self, work):
        rows = []
        for request, ids, first in work:
            cache = self.caches.get(request)
            if cache is None:
                cache = ops.zeros(self.shape, dtype=self.model.compute_dtype)
            logits, _, self.caches[request] = self.model.call_with_cache(torch.tensor([ids]), cache, first)
            rows.append(logits[0, -1])
        return torch.stack(rows)

    def finish(self, request):
        del self.caches[request]


# mistakes
from types import MethodType

from keras_hub.src.models.llama import llama_attention
from keras_hub.src.models.llama.llama_layernorm import LlamaLayerNorm
from truth import EPS, SCALE, THETA


def open_engine(folder, dtype, fault):
    llama_attention.ops = Ops() if fault == "cache" else ops
    model = load(folder, dtype)
    layers = model.backbone.transformer_layers
    norms = [layer for layer in model._flatten_layers() if isinstance(layer, LlamaLayerNorm)]
    for norm in norms if fault == "eps" else ():
        norm.epsilon = EPS
    for layer in layers:
        attention = layer._self_attention_layer
        if fault == "theta":
            attention.rotary_embedding_layer.max_wavelength = THETA
        if fault == "scale":
            attention._inv_norm_factor *= SCALE
    if fault == "residual":
        layers[1].call = MethodType(without_residual, layers[1])
    if fault == "gate_up":
        gate, up = (getattr(layers[1], f"_feedforward_{name}_dense").kernel for name in ("gate", "intermediate"))
        value = gate.value.clone()
        gate.assign(up.value.clone())
        up.assign(value)
    return Engine(model)


def without_residual(self, x, self_attention_cache, self_attention_cache_update_index):
    index = self_attention_cache_update_index
    mask = self._compute_self_attention_mask(x, None, None, self_attention_cache, index)
    normed = self._self_attention_layernorm(x)
    h, cache = self._self_attention_layer(
        normed, attention_mask=mask, cache=self_attention_cache, cache_update_index=index
    )
    x = self._feedforward_layernorm(h)
    gate = self.activation(self._feedforward_gate_dense(x))
    return h + self._feedforward_output_dense(self._feedforward_intermediate_dense(x) * gate), cache


class Ops:
    """Keras's operators, of which one writes a token of decode one slot early."""

    def __getattr__(self, name):
        return getattr(ops, name)

    def slice_update(self, cache, start, rows):
        early = int(rows.shape[1] == 1 and start[1] > 0)
        return ops.slice_update(cache, [0, start[1] - early, 0, 0], rows)
