"""Names of tensors: GGUF's, and those that HuggingFace's modules have in the families that are served."""

import re
from collections.abc import Mapping

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
_GGUF_LAYER, _HF_LAYER = "blk", "model.layers"
_NAME = re.compile(
    r"(?:(?P<layers>blk|model\.layers)\.(?P<layer>0|[1-9]\d{0,3})\.)?(?P<part>[\w.]+)\.(?P<kind>weight|bias)", re.ASCII
)

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor by which llama.cpp divides the rotary frequencies: Llama 3's scaling."""


def hf_name(name: str) -> str | None:
    """Return HF's name of a GGUF tensor: `model.layers.3.mlp.up_proj.weight` of `blk.3.ffn_up.weight`.

    None if these families have no such tensor.
    """
    return _renamed(name, _GGUF_LAYER, _HF_LAYER, _OUTSIDE, _IN_LAYER)


def gguf_name(name: str) -> str | None:
    """Return the GGUF name of one of HF's tensors; None if these families have no such tensor."""
    return _renamed(name, _HF_LAYER, _GGUF_LAYER, _OUTSIDE_REVERSED, _IN_LAYER_REVERSED)


def _renamed(name: str, layers: str, other: str, outside: Mapping[str, str], in_layer: Mapping[str, str]) -> str | None:
    """Return the other side's name, whose layers are called `other`; None if a table has none."""
    found = _NAME.fullmatch(name)
    if found is None or found["layers"] not in (None, layers):
        return None
    prefix, table = ("", outside) if found["layer"] is None else (f"{other}.{int(found['layer'])}.", in_layer)
    return f"{prefix}{table[found['part']]}.{found['kind']}" if found["part"] in table else None


def is_query_or_key(name: str) -> bool:
    """Whether HF's tensor makes queries or keys, whose rows Llama's GGUF has in another order."""
    return re.search(r"\.self_attn\.[qk]_proj\.(weight|bias)$", name) is not None
