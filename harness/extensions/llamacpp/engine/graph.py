"""The taps of llama.cpp's graph, node by node, and their capture through its evaluation callback.

Products, norms and look-ups are told by the *weight* that they use: some have no name of their own (the output
projection of Qwen), and names change between versions. Only what has no weight is told by its name.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.engine.tensor import Tensor, llama
from harness.extensions.llamacpp.gguf.architecture import hf_name
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
    if operation in ("MUL", "ADD") and (weight := _of_weight(node.source(1))) is not None:
        return weight  # a norm times its weight, a product and its bias
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
    match = _IN_LAYER.fullmatch(_name(turned_context(node)))
    is_context = match is not None and match["name"] == _ATTENTION
    return f"{layer_prefix(int(match['layer']))}attention" if match is not None and is_context else None


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


_WITH_HEADS = ("q_norm", "k_norm", "q_rope", "k_rope")
"""Taps whose heads are a dimension of their own in ggml."""


@dataclass(slots=True)
class UBatch:
    """One forward of llama.cpp: a batch, or a part of it."""

    taps: dict[str, torch.Tensor] = field(default_factory=dict)
    """[rows or outputs, W] in the order of HF's heads."""
    positions: torch.Tensor | None = None
    """[rows] as the rotary embedding was given them."""
    outputs: torch.Tensor | None = None
    """[outputs] rows that were kept for the head."""


class GraphWatcher:
    """Sees the nodes of llama.cpp's graph; give `callback` to a context. See `ggml_backend_sched_eval_callback`."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._is_checked = False
        self.callback: Any = llama().ggml_backend_sched_eval_callback(self._called)

    def wants(self, node: Tensor) -> bool:
        """Return whether a node is to be shown when it is computed: llama.cpp then computes up to it, and waits."""
        raise NotImplementedError

    def computed(self, node: Tensor) -> None:
        """Take a node that was wanted, and is there now."""
        raise NotImplementedError

    def raise_error(self) -> None:
        """Raise what went wrong since the last call."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _called(self, address: int, is_asked: bool, _data: object) -> bool:
        try:
            node = Tensor(address)
            if not self._is_checked:
                node.check_layout()
                self._is_checked = True
            if is_asked:
                return self.wants(node)
            self.computed(node)
            return True
        except BaseException as error:  # nothing may be raised into C
            self._error = self._error or error
            return not is_asked


class Capture(GraphWatcher):
    """Keeps the taps of the batches that are computed."""

    def __init__(
        self, weights: Collection[str], *, head_dim: int, interleaves: bool, turns_values: bool = False
    ) -> None:
        """Prepare to capture.

        Args:
            weights: names of the tensors in the model's file.
            head_dim: size of a head.
            interleaves: whether rows of q and k stand as interleaved rotary pairs.
            turns_values: whether values turn before they are stored.
        """
        super().__init__()
        self._turns_values = turns_values
        self._weights, self._head_dim, self._interleaves = weights, head_dim, interleaves
        self._ubatches: list[UBatch] = []

    def take(self) -> list[UBatch]:
        """Return what was computed since the last call.

        Raises:
            HarnessError: a tensor could not be read.
        """
        ubatches, self._ubatches = self._ubatches, []
        self.raise_error()
        return ubatches

    def wants(self, node: Tensor) -> bool:
        """See `GraphWatcher`."""
        return self._tap(node) is not None

    def computed(self, node: Tensor) -> None:
        """See `GraphWatcher`."""
        if (tap := self._tap(node)) is not None:
            self._keep(tap, node)

    def _tap(self, node: Tensor) -> str | None:
        return tap_of(node, self._weights, turns_values=self._turns_values)

    def _keep(self, tap: str, node: Tensor) -> None:
        if tap == EMBEDDING or not self._ubatches:
            self._ubatches.append(UBatch())
        ubatch = self._ubatches[-1]
        if tap in ubatch.taps and not adds_adapter(node):
            what = f"two nodes of llama.cpp's graph are taken for {tap}"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where=node.name, hint="report the model's architecture")
        turned = turned_context(node)
        values = node.values() if turned is None else node.values().reshape(turned.shape)
        ubatch.taps[tap] = self._rows(tap, values)
        if tap.endswith("q_rope") and ubatch.positions is None and (positions := node.source(1)) is not None:
            ubatch.positions = positions.values().flatten()
        if tap.endswith("attn_residual"):
            ubatch.outputs = _kept_rows(node) if ubatch.outputs is None else ubatch.outputs

    def _rows(self, tap: str, values: torch.Tensor) -> torch.Tensor:
        """[rows, W] of [1, rows, heads, head_dim] or [1, 1, rows, W], in the order of HF's heads."""
        rows = values[0].flatten(1) if tap.endswith(_WITH_HEADS) else values[0, 0]
        if self._interleaves and has_interleaved_heads(tap):
            rows = halves_of_pairs(rows, self._head_dim)
        return rows


def halves_of_pairs(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Put heads [rows, heads * head_dim] of interleaved rotary pairs in HF's order."""
    return rows.reshape(len(rows), -1, head_dim // 2, 2).transpose(2, 3).reshape(rows.shape)


def _kept_rows(node: Tensor) -> torch.Tensor | None:
    """Return the indices by which an operand's rows were picked; None if all were kept."""
    operand = node.source(0)
    picked = operand.source(1) if operand is not None and operand.op == "GET_ROWS" else None
    return None if picked is None else picked.values().flatten()
