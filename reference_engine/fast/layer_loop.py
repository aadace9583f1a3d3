"""All layers of a decode step in one call of a C++ operator.

At one row a step takes as long as its weights take to be read, and some ten microseconds for every call from Python
beside. The operator runs the kernels that `fused.FusedDecoder` calls one by one, in the same order, so its bits are
the same. A step that is observed, has chunks of several rows or adapters, takes the calls one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from reference_engine.batch import Batch
from reference_engine.fast.attention.cpp import CppAttention, CppPlan
from reference_engine.fast.products import FewRows
from reference_engine.layers import MLP, Linear, RMSNorm
from reference_engine.model import Attention, DecoderLayer

__all__ = ["LayerLoop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoop:
    """The layers of a decoder as the operator takes them: see Layers in kernels/cpu/layers.h."""

    operator: Any
    tensors: tuple[list[torch.Tensor], ...]
    """Norms, weights, biases, norms of queries and keys, caches."""
    windows: list[int]
    numbers: tuple[Any, ...]
    """Epsilons of the norms and of those of queries and keys, heads, KV heads, and the way of a single row."""
    max_rows: int

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer], final_norm: RMSNorm, operators: Any) -> LayerLoop | None:
        """Return the loop over some layers that can be fused; None where the operator does not compute what they do."""
        operator = getattr(operators, "decode_layers", None)
        parts = [part for layer in layers if (part := _Part.of(layer)) is not None]
        if operator is None or len(parts) < len(layers) or len({part.alike for part in parts}) > 1:
            return None
        if {part.norms[0].eps for part in parts} != {final_norm.eps}:
            return None
        norms = [norm for part in parts for norm in part.norms]
        products = [product for part in parts for product in part.products]
        nothing, first = final_norm.weight_X.new_empty(0), parts[0]
        return cls(
            operator=operator,
            tensors=(
                [norm.weight_X for norm in (*norms, final_norm)],
                [product.weight_OI for product in products],
                [nothing if product.bias_O is None else product.bias_O for product in products],
                [norm.weight_X for part in parts for norm in part.qk_norms],
                [cache for part in parts for cache in part.backend.layer_cache(part.layer)],
            ),
            windows=[part.backend.window(part.layer) or 0 for part in parts],
            numbers=first.alike[:-1],
            max_rows=first.alike[-1],
        )

    def serves(self, batch: Batch) -> bool:
        """Whether a step has one row of each request, few enough of them, and nobody who looks on or changes them."""
        is_plain = batch.observer is None and not batch.adapters
        return is_plain and batch.num_single == len(batch.query_lens) <= self.max_rows

    def __call__(self, x_TD: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the residual stream [T, D] after the last layer, normalised."""
        plan: CppPlan = batch.plan
        places = (batch.slot_mapping_T, plan.tables_RB, plan.context_lens_R)
        normed_TD: torch.Tensor = self.operator(x_TD, *rotation, *places, *self.tensors, self.windows, *self.numbers)
        return normed_TD


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One layer, of the parts that the operator computes."""

    layer: int
    """Number among the layers that keep K and V."""
    backend: CppAttention
    norms: tuple[RMSNorm, RMSNorm]
    products: tuple[Linear, ...]
    qk_norms: tuple[RMSNorm, ...]
    alike: tuple[Any, ...]
    """What all layers have to have in common: `LayerLoop.numbers`, and the most rows of their products."""

    @classmethod
    def of(cls, layer: DecoderLayer) -> _Part | None:
        """Return the parts of a layer that can be fused; None where one of them is another one."""
        attention, mlp = layer.attention, layer.mlp
        if not (
            isinstance(attention, Attention) and isinstance(mlp, MLP) and isinstance(attention.backend, CppAttention)
        ):
            return None
        parts = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        products = tuple(item for item in parts if isinstance(item, Linear))
        few = [product.product for product in products if isinstance(product.product, FewRows)]
        ways = {tuple(item.kernel.keywords.values()) for item in few if isinstance(item.kernel, partial)}
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        qk_norms = tuple(norm for norm in (attention.q_norm, attention.k_norm) if norm is not None)
        epsilons, qk_epsilons = {norm.eps for norm in norms}, {norm.eps for norm in qk_norms} or {0.0}
        if len(few) < len(parts) or len(ways) != 1 or len(qk_norms) == 1 or len(epsilons) + len(qk_epsilons) > 2:
            return None
        num_heads, num_kv_heads = (size // attention.head_dim for size in attention.qkv_sizes[:2])
        max_rows = min(item.max_rows for item in few)
        alike = (*epsilons, *qk_epsilons, num_heads, num_kv_heads, *ways.pop(), max_rows)
        return cls(
            layer=attention.layer,
            backend=attention.backend,
            norms=norms,
            products=products,
            qk_norms=qk_norms,
            alike=alike,
        )
