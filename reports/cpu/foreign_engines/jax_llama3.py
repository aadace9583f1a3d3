"""llama3 of the GitHub repository jax-ml/jax-llm-examples: `pip install jax etils importlib_resources`, its folder llama3 on PYTHONPATH.

It is compiled, so that it is run with `jax.disable_jit()`, and the results of its functions are dumped. Its norms give
bfloat16 whatever the dtype is, and their eps is 1e-6.
"""

import dataclasses
import json
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
from llama3_jax import model as llama3
from safetensors.torch import load_file

DTYPES = ("bfloat16",)
SETTINGS = {"rms_norm_eps": 1e-6}
LACKS = ("cache",)
FUNCTIONS = (
    "einsum",
    "apply_rotary_embedding",
    "rms_norm",
    "attention",
    "attention_block",
    "ffn_block",
    "forward_layer",
)


def load(folder):
    config = json.loads((folder / "config.json").read_text())
    rope = {"factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope_theta = config["rope_parameters"]["rope_theta"]
    cfg = llama3.llama_to_jax_config(config | {"rope_scaling": rope, "rope_theta": rope_theta})
    axes = (jax.sharding.AxisType.Explicit,) * 3
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), axis_types=axes)
    cfg = dataclasses.replace(cfg, mesh=mesh, quant_layer=False, quant_cache=False)
    weights = {
        name: jnp.asarray(item.float().numpy(), jnp.bfloat16)
        for name, item in load_file(folder / "model.safetensors").items()
    }
    heads = {"q": cfg.q_heads, "k": cfg.kv_heads, "v": cfg.kv_heads}
    layers = []
    for at in range(cfg.num_layers):
        path = f"model.layers.{at}."
        theirs = {
            name: weights[f"{path}self_attn.{name}_proj.weight"].T.reshape(cfg.embed, heads[name], cfg.head_dim)
            for name in "qkv"
        }
        theirs |= {f"w_{name}": weights[f"{path}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down")}
        layers.append(llama3.Layer(
            o=weights[path + "self_attn.o_proj.weight"].T.reshape(cfg.q_heads, cfg.head_dim, cfg.embed),
            attn_pre_gamma=weights[path + "input_layernorm.weight"],
            attn_post_gamma=weights[path + "post_attention_layernorm.weight"], **theirs,
        ))  # fmt: skip
    return cfg, llama3.Weights(
        layers=layers, embedding=weights["model.embed_tokens.weight"], gamma_final=weights["model.norm.weight"],
        lm_head=weights["lm_head.weight"].T,
    )  # fmt: skip


def write(cfg, weights, ids, out):
    out.mkdir()
    number = count()

    def saving(name, function):
        def saved(*args, **options):
            result = function(*args, **options)
            for array in jax.tree.leaves(result):
                np.save(out / f"{next(number):04}-{name}.npy", np.asarray(array.astype(jnp.float32)))
            return result

        return saved

    for name in FUNCTIONS:
        setattr(llama3, name, saving(name, getattr(llama3, name)))
    with jax.disable_jit(), jax.set_mesh(cfg.mesh):
        llama3.forward(jnp.array([ids]), jnp.ones((1, len(ids)), jnp.int32), weights, cfg, None)


# mistakes
from truth import EPS, SCALE, THETA

ORIGINAL = {name: getattr(llama3, name) for name in FUNCTIONS}


def dump(folder, dtype, fault, ids, out):
    jax.clear_caches()
    for name, function in ORIGINAL.items():
        setattr(llama3, name, function)
    cfg, weights = load(folder)
    if fault == "theta":
        cfg = dataclasses.replace(cfg, rope_theta=THETA)
    if fault == "eps":
        llama3.rms_norm = norm
    if fault == "scale":
        llama3.attention = lambda q, *others: ORIGINAL["attention"](q * SCALE, *others)
    if fault == "residual":
        llama3.forward_layer = layer
    if fault == "gate_up":
        one = weights.layers[1]
        one.w_gate, one.w_up = one.w_up, one.w_gate
    write(cfg, weights, ids, out)


def norm(x, gamma):
    rms = jnp.sqrt(jnp.mean(jnp.astype(x, jnp.float32) ** 2, axis=-1, keepdims=True) + EPS)
    return jnp.astype(gamma * x / rms, jnp.bfloat16)


def layer(x, segment_ids, weights, sin, cos, idx, cfg, cache=None):
    normed = llama3.rms_norm(x, weights.attn_pre_gamma)
    out, updates = llama3.attention_block(normed, segment_ids, weights, sin, cos, cfg, cache, idx)
    x = out if idx == 1 else x + out
    return x + llama3.ffn_block(llama3.rms_norm(x, weights.attn_post_gamma), weights, cfg), updates
