"""llama3.np, of the GitHub repository likejazz/llama3.np: a copy of it on PYTHONPATH is all that it needs.

It is numpy, so that its tensors are dumped. A subclass of arrays writes the result of every operator into a folder.
"""

import json
from itertools import count
from pathlib import Path

import config as settings
import llama3
import numpy as np
from safetensors.numpy import load_file

DTYPES = ("float32",)
LACKS = ("cache",)


class Traced(np.ndarray):
    """Saves what operators and functions make of it; what they make is traced, too."""

    out, number = Path(), count()

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        if "out" in options:
            options["out"] = tuple(map(np.asarray, options["out"]))
        return saved(getattr(ufunc, method)(*map(np.asarray, inputs), **options), ufunc)

    def __array_function__(self, function, types, args, options):
        return saved(super().__array_function__(function, types, args, options), function)


def saved(result, maker):
    if not isinstance(result, np.ndarray):
        return result
    np.save(Traced.out / f"{next(Traced.number):04}-{maker.__name__}.npy", np.asarray(result))
    return result.view(Traced)


def load(folder):
    config = json.loads((folder / "config.json").read_text())
    args = settings.ModelArgs(
        dim=config["hidden_size"], n_layers=config["num_hidden_layers"], n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"], vocab_size=config["vocab_size"], norm_eps=config["rms_norm_eps"],
    )  # fmt: skip
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():  # neighbouring elements are rotated
        if "q_proj" in name or "k_proj" in name:
            pairs = weight.reshape(-1, 2, config["head_dim"] // 2, weight.shape[1]).swapaxes(1, 2)
            weights[name] = pairs.reshape(weight.shape)
    np.savez(folder / "llama3.npz", **weights)
    return llama3.Llama(folder / "llama3.npz", args)


def write(model, ids, out):
    out.mkdir()
    Traced.out = out
    model.tok_embedding = model.tok_embedding.view(Traced) * np.float32(1)
    model(np.array([ids]), 0)


# mistakes
from truth import EPS, SCALE, THETA


def dump(folder, dtype, fault, ids, out):
    model = load(folder)
    if fault == "theta":
        model.freqs_cos, model.freqs_sin = llama3.compute_cos_sin_cache(16, 256, THETA)
    for layer in model.layers:
        if fault == "eps":
            layer.input_layernorm.eps = layer.post_attention_layernorm.eps = model.norm.eps = EPS
    llama3.math = type("", (), {"sqrt": lambda size: size**0.5 / (SCALE if fault == "scale" else 1)})
    if fault == "residual":
        model.layers[1] = WithoutResidual(model.layers[1])
    if fault == "gate_up":
        mlp = model.layers[1].feed_forward
        mlp.gate_weight, mlp.up_weight = mlp.up_weight, mlp.gate_weight
    write(model, ids, out)


class WithoutResidual:
    def __init__(self, block):
        self.block = block

    def __call__(self, x, *others):
        z = self.block.attention(self.block.input_layernorm(x), *others)
        return z + self.block.feed_forward(self.block.post_attention_layernorm(z))
