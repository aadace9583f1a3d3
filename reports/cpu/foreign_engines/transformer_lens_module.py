"""TransformerLens, its HookedTransformer as it is: `pip install transformer-lens==2.18.0`. It computes all tokens in each step."""

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.pretrained.weight_conversions import convert_llama_weights
from transformers import LlamaForCausalLM

DTYPES = ("float32", "bfloat16")
LACKS = ("cache",)


def load(folder, dtype, **changes):
    llama = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    hf = llama.config
    config = HookedTransformerConfig(**{
        "n_layers": hf.num_hidden_layers, "d_model": hf.hidden_size, "d_head": hf.head_dim, "n_ctx": 256,
        "n_heads": hf.num_attention_heads, "n_key_value_heads": hf.num_key_value_heads, "act_fn": "silu",
        "d_mlp": hf.intermediate_size, "d_vocab": hf.vocab_size, "eps": hf.rms_norm_eps, "gated_mlp": True,
        "normalization_type": "RMS", "positional_embedding_type": "rotary", "rotary_dim": hf.head_dim,
        "rotary_base": hf.rope_parameters["rope_theta"], "rotary_adjacent_pairs": False, "final_rms": True,
        "dtype": getattr(torch, dtype), "device": "cpu", "default_prepend_bos": False, **changes,
    })  # fmt: skip
    model = HookedTransformer(config).eval()
    model.load_state_dict(convert_llama_weights(llama, config), strict=False)
    return model


# mistakes
from truth import EPS, SCALE, THETA


def open_engine(folder, dtype, fault):
    model = load(folder, dtype, **{"theta": {"rotary_base": THETA}, "eps": {"eps": EPS}}.get(fault, {}))
    if fault == "scale":
        for block in model.blocks:
            block.attn.attn_scale /= SCALE
    block = model.blocks[1]
    if fault == "residual":
        block.hook_resid_mid = WithoutResidual()
        block.hook_attn_out.register_forward_hook(lambda _module, _args, out: setattr(block.hook_resid_mid, "out", out))
    if fault == "gate_up":
        block.mlp.W_in, block.mlp.W_gate = block.mlp.W_gate, block.mlp.W_in
    return model


class WithoutResidual(torch.nn.Module):
    def forward(self, _sum):
        return self.out
