"""Names of tensors: GGUF's, and those that HuggingFace's modules have in the families that are served."""

import re

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE_REVERSED = {module: name for name, module in _OUTSIDE.items()}
_IN_LAYER_REVERSED = {module: name for name, module in _IN_LAYER.items()}
_GGUF_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,4})\.)?(?P<part>\w+)\.(?P<kind>weight|bias)", re.ASCII)
_HF_NAME = re.compile(r"(?:model\.layers\.(?P<layer>\d{1,4})\.)?(?P<part>[\w.]+)\.(?P<kind>weight|bias)", re.ASCII)

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor by which llama.cpp divides the rotary frequencies: Llama 3's scaling."""


def hf_name(name: str) -> str | None:
    """Return HF's name of a GGUF tensor: `model.layers.3.mlp.up_proj.weight` of `blk.3.ffn_up.weight`.

    None where these families have no such tensor.
    """
    found = _GGUF_NAME.fullmatch(name)
    if found is None:
        return None
    layer, part, kind = found["layer"], found["part"], found["kind"]
    if layer is None:
        return f"{_OUTSIDE[part]}.{kind}" if part in _OUTSIDE else None
    return f"model.layers.{int(layer)}.{_IN_LAYER[part]}.{kind}" if part in _IN_LAYER else None


def gguf_name(name: str) -> str | None:
    """Return the GGUF name of one of HF's tensors; None where these families have no such tensor."""
    found = _HF_NAME.fullmatch(name)
    if found is None:
        return None
    layer, part, kind = found["layer"], found["part"], found["kind"]
    if layer is None:
        return f"{_OUTSIDE_REVERSED[part]}.{kind}" if part in _OUTSIDE_REVERSED else None
    return f"blk.{layer}.{_IN_LAYER_REVERSED[part]}.{kind}" if part in _IN_LAYER_REVERSED else None


def is_query_or_key(name: str) -> bool:
    """Whether HF's tensor makes queries or keys, whose rows Llama's GGUF has in another order."""
    return re.search(r"\.self_attn\.[qk]_proj\.(weight|bias)$", name) is not None
