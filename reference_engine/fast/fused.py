"""The decoder with its small operations fused: 10 operators a layer where `model.Decoder` has 52.

(Qwen3 in 16 bits.) At batch 1 a step takes as long as its weights take to be read, and some us for every operation
beside. On an H200 a step of 8B takes 5.4 ms, and 9.2 without these kernels (reports/h200/engine.md); of a CPU see
reports/cpu/engine.md.
Matrix products, attention and their order are those of `model.Decoder`, of which this is another reading, and each
operation rounds where its own does. An observer sees every tap, so that a check judges these kernels and no others.

Shapes: T tokens, N query heads, K KV heads, A = N + K, H head dim, D hidden, V vocab, R sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from reference_engine.batch import Batch
from reference_engine.fast.layer_loop import LayerLoop
from reference_engine.layers import MLP, RMSNorm
from reference_engine.model import Attention, Decoder, DecoderLayer, Layer

__all__ = ["FusedDecoder", "is_fusable"]


def is_fusable(decoder: Decoder) -> bool:
    """Tell whether the kernels compute what the layers do."""
    are_plain = all(_is_plain(layer) for layer in decoder.layers)
    return are_plain and decoder.local_rotary is None and type(decoder.norm) is RMSNorm


def _is_plain(layer: Layer) -> bool:
    if not isinstance(layer, DecoderLayer) or not isinstance(layer.mlp, MLP) or layer.mlp.activation is not silu:
        return False
    return isinstance(layer.attention, Attention) and not layer.attention.is_gated


@dataclass(frozen=True, slots=True)
class FusedDecoder:
    """A `Decoder` in fewer launches, on the weights of the one that it is made of."""

    decoder: Decoder
    layers: tuple[DecoderLayer, ...]
    """The decoder's."""
    operators: Any
    """The kernels: `triton_operators` or those of `cpp_operators`."""
    loop: LayerLoop | None = None
    """All layers in one call, for the steps that it serves."""

    @classmethod
    def of(cls, decoder: Decoder, operators: Any) -> FusedDecoder:
        """Return another reading of a decoder that is not compiled."""
        layers = tuple(layer for layer in decoder.layers if isinstance(layer, DecoderLayer))
        assert len(layers) == len(decoder.layers), "compiled layers are fused by the compiler"
        return cls(decoder, layers, operators, LayerLoop.of(layers, decoder.norm, operators))

    def __call__(self, batch: Batch) -> torch.Tensor | None:
        """Return the logits [R, V], or None when no row is sampled."""
        x_TD = self.decoder.embed_tokens(batch.token_ids_T)
        batch.tap("model.", "embed_tokens", x_TD)
        rotation = self.decoder.rotary.by_request(batch.positions_T, batch.rope_lens, batch.query_lens)
        with torch.cuda.device_of(x_TD):  # Triton launches on the current device, which need not be this one
            normed_TD = self._decode_layers(x_TD, rotation, batch)
        batch.tap("model.", "norm", normed_TD)
        return self.decoder.logits(normed_TD, batch)

    def _decode_layers(
        self, x_TD: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], batch: Batch
    ) -> torch.Tensor:
        """Return the residual stream [T, D] after the last layer, normalised."""
        if self.loop is not None and self.loop.serves(batch):
            return self.loop(x_TD, rotation, batch)
        norms_behind = [*(layer.input_layernorm for layer in self.layers[1:]), self.decoder.norm]
        first = self.layers[0].input_layernorm
        normed_TD: torch.Tensor = self.operators.rms_norm(x_TD, first.weight_X, first.eps)
        for layer, norm_behind in zip(self.layers, norms_behind, strict=True):
            batch.tap(layer.prefix, "input_layernorm", normed_TD)
            assert isinstance(layer.attention, Attention), "other mixers are not fused"
            delta_TD = self._attention(layer.attention, normed_TD, rotation, batch, layer.prefix)
            x_TD, normed_TD = self._add_norm(x_TD, delta_TD, layer.post_attention_layernorm)
            batch.tap(layer.prefix, "attn_residual", x_TD)
            batch.tap(layer.prefix, "post_attention_layernorm", normed_TD)
            assert isinstance(layer.mlp, MLP), "other families are not fused"
            delta_TD = self._mlp(layer.mlp, normed_TD, batch, layer.prefix)
            x_TD, normed_TD = self._add_norm(x_TD, delta_TD, norm_behind)
            batch.tap(layer.prefix, "output", x_TD)
        return normed_TD

    def _add_norm(self, x_TD: torch.Tensor, delta_TD: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        added: tuple[torch.Tensor, torch.Tensor] = self.operators.add_norm(x_TD, delta_TD, norm.weight_X, norm.eps)
        return added

    def _attention(
        self,
        attention: Attention,
        x_TD: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        prefix: str,
    ) -> torch.Tensor:
        """Return [T, D]: what `model.Attention` does."""
        qkv = attention.qkv_proj(x_TD)
        q, k, v = torch.split(qkv, attention.qkv_sizes, dim=-1)
        for name, projected in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
            batch.tap(prefix, f"self_attn.{name}", projected)
        q_TNH, k_TKH = self._norm_rotate(attention, qkv, rotation, batch, prefix)
        context = attention.backend.attend(
            attention.layer, q_TNH, k_TKH, v.view(len(v), -1, attention.head_dim), batch
        ).flatten(1)
        batch.tap(prefix, "attention", context)
        out_TD = attention.o_proj(context)
        batch.tap(prefix, "self_attn.o_proj", out_TD)
        return out_TD

    def _norm_rotate(
        self,
        attention: Attention,
        qkv: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        prefix: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q [T, N, H] and k [T, K, H], two views of [T, A, H]."""
        num_heads, num_kv_heads = (size // attention.head_dim for size in attention.qkv_sizes[:2])
        q_norm, k_norm = attention.q_norm, attention.k_norm
        q_weight, k_weight, eps = None, None, 0.0
        if q_norm is not None and k_norm is not None:
            q_weight, k_weight, eps = q_norm.weight_X, k_norm.weight_X, q_norm.eps
        is_watched = batch.observer is not None and q_weight is not None
        rotated_TAH, normed_TAH = self.operators.norm_rotate(
            qkv, *rotation, q_weight, k_weight, eps, num_heads, num_kv_heads, keeps_normed=is_watched
        )
        if is_watched:
            batch.tap(prefix, "self_attn.q_norm", normed_TAH[:, :num_heads])
            batch.tap(prefix, "self_attn.k_norm", normed_TAH[:, num_heads:])
        q_TNH, k_TKH = rotated_TAH[:, :num_heads], rotated_TAH[:, num_heads:]
        batch.tap(prefix, "q_rope", q_TNH)
        batch.tap(prefix, "k_rope", k_TKH)
        return q_TNH, k_TKH

    def _mlp(self, mlp: MLP, x_TD: torch.Tensor, batch: Batch, prefix: str) -> torch.Tensor:
        """Return [T, D]: what `layers.MLP` does."""
        gate_up_T2F = mlp.gate_up_proj(x_TD)
        if batch.observer is not None:
            gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
            batch.tap(prefix, "mlp.gate_proj", gate_TF)
            batch.tap(prefix, "mlp.up_proj", up_TF)
        act_TF: torch.Tensor = self.operators.silu_mul(gate_up_T2F)
        batch.tap(prefix, "mlp.act", act_TF)
        out_TD = mlp.down_proj(act_TF)
        batch.tap(prefix, "mlp.down_proj", out_TD)
        return out_TD
