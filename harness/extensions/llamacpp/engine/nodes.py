"""The taps of llama.cpp's graph, node by node.

Products, norms and look-ups are told by the *weight* that they use: some have no name of their own (the output
projection of Qwen), and names change between versions. Only what has no weight is told by its name.
"""

import re
from collections.abc import Collection

from harness.extensions.llamacpp.engine.tensor import Tensor
from harness.extensions.llamacpp.gguf.names import hf_name
from harness.formats.taps import EMBEDDING, FINAL_NORM, LOGITS, layer_prefix

_NAMED = {
    ("ROPE", "Qcur"): "q_rope",
    ("ROPE", "Kcur"): "k_rope",
    ("ADD", "ffn_inp"): "attn_residual",
    ("SWIGLU", "ffn_swiglu"): "mlp.act",
    ("ADD", "l_out"): "output",
}
_ATTENTION = "kqv_out"
_VALUE_ROTATION = "attn_inp_v_rot"
_IN_LAYER = re.compile(r"(?P<name>[A-Za-z_]+)-(?P<layer>\d+)", re.ASCII)
_AFTER_ATTENTION = ("attn_residual", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.act",
                    "mlp.down_proj", "output")  # fmt: skip
_HEADS = ("q_proj", "k_proj", "q_rope", "k_rope")


def tap_of(node: Tensor, weights: Collection[str], *, turns_values: bool = False) -> str | None:
    """Return the tap that a node computes; None for all others.

    Args:
        node: of the graph.
        weights: names of the tensors in the model's file.
        turns_values: whether what attention gives is in the basis of a quantised cache, and is turned back after it.
    """
    operation = node.op
    if operation == "MUL_MAT":
        return _turned_back(node) if _name(node.source(0)) == _VALUE_ROTATION else _product(node, weights)
    if operation in ("MUL", "ADD") and (found := _of_weight(node.source(1))) is not None:
        return found  # a norm times its weight, a product and its bias
    if adds_adapter(node):
        product = node.source(0)
        return None if product is None else _product(product, weights)
    if operation == "GET_ROWS" and _name(node.source(0)) == "token_embd.weight":
        return EMBEDDING
    found_name = _IN_LAYER.fullmatch(node.name)
    if found_name is None:
        return None
    layer = layer_prefix(int(found_name["layer"]))
    if found_name["name"] == _ATTENTION:
        return None if turns_values else f"{layer}attention"
    site = _NAMED.get((operation, found_name["name"]))
    return f"{layer}{site}" if site else None


def adds_adapter(node: Tensor) -> bool:
    """Whether a node adds what an adapter makes of a product's input: it follows the product, and is its tap."""
    product, update = node.source(0), node.source(1)
    is_sum = node.op == "ADD" and product is not None and update is not None
    return is_sum and (product.op, update.op) == ("MUL_MAT", "SCALE")  # type: ignore[union-attr]


def has_interleaved_heads(tap: str) -> bool:
    """Whether a tap has heads whose halves some families keep as interleaved pairs."""
    return tap.endswith(_HEADS)


def pruned_taps(num_layers: int) -> tuple[str, ...]:
    """Return the taps that llama.cpp computes only for the rows whose logits were asked for.

    In the last layer it drops the other rows as soon as attention is done.
    """
    last = layer_prefix(num_layers - 1)
    return (*(f"{last}{site}" for site in _AFTER_ATTENTION), FINAL_NORM, LOGITS)


def turned_context(node: Tensor) -> Tensor | None:
    """Return the context that a node turns back from the basis of the cache; None for any other node."""
    operand = node.source(1) if _name(node.source(0)) == _VALUE_ROTATION else None
    return None if operand is None else operand.source(0)


def _turned_back(node: Tensor) -> str | None:
    """Return the tap of a product with the matrix that turns values: of attention's context, not of the values."""
    found = _IN_LAYER.fullmatch(_name(turned_context(node)))
    is_context = found is not None and found["name"] == _ATTENTION
    return f"{layer_prefix(int(found['layer']))}attention" if found is not None and is_context else None


def _product(node: Tensor, weights: Collection[str]) -> str | None:
    name = _name(node.source(0))
    if name == "token_embd.weight":  # a tied head
        return LOGITS
    if name.replace(".weight", ".bias") in weights:
        return None  # the sum with the bias follows
    return _of_weight(node.source(0))


def _of_weight(operand: Tensor | None) -> str | None:
    name = hf_name(_name(operand))
    return None if name is None else name.rpartition(".")[0]


def _name(operand: Tensor | None) -> str:
    return "" if operand is None else operand.name
