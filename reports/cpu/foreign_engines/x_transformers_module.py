"""x-transformers, its module as it is: `pip install x-transformers einops einx loguru frozendict torch_einops_utils`.

It computes all tokens in each step. Its norms have no eps, and multiply by 1 + weight; it tiles the heads of keys instead
of repeating them; its products of the gate have a bias, which is zero here.
"""

import json

import torch
from safetensors.torch import load_file
from x_transformers import Decoder, TransformerWrapper

DTYPES = ("float32", "bfloat16")
SETTINGS = {"rms_norm_eps": 1e-12}
LACKS = ("cache",)


def load(folder, dtype):
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    size, hidden = config["head_dim"], config["hidden_size"]
    layers = Decoder(
        dim=hidden, depth=config["num_hidden_layers"], heads=config["num_attention_heads"], attn_dim_head=size,
        attn_kv_heads=config["num_key_value_heads"], rotary_pos_emb=True, rotary_emb_dim=size, use_rmsnorm=True,
        ff_glu=True, ff_swish=True, ff_no_bias=True, ff_mult=config["intermediate_size"] / hidden,
    )  # fmt: skip
    model = TransformerWrapper(
        num_tokens=config["vocab_size"], max_seq_len=256, use_abs_pos_emb=False, attn_layers=layers
    )

    def pairs(weight):
        return weight.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).reshape(weight.shape)

    def tiled(weight, dim):
        heads = weight.unflatten(dim, (config["num_key_value_heads"], -1, size))
        return heads.transpose(dim, dim + 1).reshape(weight.shape)

    state = {
        "token_emb.emb.weight": weights["model.embed_tokens.weight"],
        "attn_layers.final_norm.g": weights["model.norm.weight"] - 1,
        "to_logits.weight": weights["lm_head.weight"],
    }
    for at in range(config["num_hidden_layers"]):
        path, attention, mlp = (
            f"model.layers.{at}.",
            f"attn_layers.layers.{2 * at}.",
            f"attn_layers.layers.{2 * at + 1}.",
        )
        state[attention + "0.0.g"] = weights[path + "input_layernorm.weight"] - 1
        state[attention + "1.to_q.weight"] = tiled(pairs(weights[path + "self_attn.q_proj.weight"]), 0)
        state[attention + "1.to_k.weight"] = pairs(weights[path + "self_attn.k_proj.weight"])
        state[attention + "1.to_v.weight"] = weights[path + "self_attn.v_proj.weight"]
        state[attention + "1.to_out.weight"] = tiled(weights[path + "self_attn.o_proj.weight"], 1)
        state[mlp + "0.0.g"] = weights[path + "post_attention_layernorm.weight"] - 1
        up_gate = weights[path + "mlp.up_proj.weight"], weights[path + "mlp.gate_proj.weight"]
        state[mlp + "1.ff.0.proj.weight"] = torch.cat(up_gate)
        state[mlp + "1.ff.0.proj.bias"] = torch.zeros(2 * config["intermediate_size"])
        state[mlp + "1.ff.2.weight"] = weights[path + "mlp.down_proj.weight"]
    model.load_state_dict(state, strict=False)
    return model.to(getattr(torch, dtype)).eval()


# mistakes
from torch.nn import functional
from truth import EPS, SCALE, THETA
from x_transformers.x_transformers import Attend, Residual, RMSNorm


def open_engine(folder, dtype, fault):
    model = load(folder, dtype)
    decoder = model.attn_layers
    if fault == "theta":
        decoder.rotary_pos_emb.inv_freq.copy_(1 / THETA ** (torch.arange(0, 16, 2) / 16))
    for module in model.modules():
        if fault == "eps" and isinstance(module, RMSNorm):
            module.forward = norm(module)
        if fault == "scale" and isinstance(module, Attend):
            module.scale = 16**-0.5 * SCALE
    if fault == "residual":
        decoder.layers[2][2] = WithoutResidual(decoder.dim)
    if fault == "gate_up":
        weight = decoder.layers[3][1].ff[0].proj.weight
        weight.data = weight.data.roll(len(weight) // 2, 0)
    return model


class WithoutResidual(Residual):
    def forward(self, x, residual, **others):
        return x


def norm(module):
    return lambda x: functional.rms_norm(x, x.shape[-1:], module.g + 1, EPS)
