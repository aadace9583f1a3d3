"""The gated delta net of Qwen3-Next, which stands in the place of attention in most of its layers.

Shapes: T tokens, R requests, D hidden, C channels, W kernel width, G key heads, N value heads, A key head dim,
H value head dim.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import conv1d, silu, softplus

from reference_engine.batch import Batch
from reference_engine.checkpoint.delta_net import DeltaNetShape
from reference_engine.families.parts import LayerParts
from reference_engine.families.state_cache import Piece, StateCache
from reference_engine.layers import Linear, Rotation

__all__ = ["GatedDeltaNet", "GatedRMSNorm", "build_delta_net", "gated_delta_rule"]

_MAX_CHUNK = 64
"""Tokens whose updates are solved for together, as in transformers."""


@dataclass(frozen=True, slots=True)
class GatedRMSNorm:
    """Scale to unit root mean square over the last dimension, then multiply by the SiLU of a gate."""

    weight_H: torch.Tensor
    eps: float

    def __call__(self, x_TNH: torch.Tensor, gate_TNH: torch.Tensor) -> torch.Tensor:
        """Return a new tensor of the same shape."""
        x32 = x_TNH.to(torch.float32)
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight_H * normed.to(x_TNH.dtype) * silu(gate_TNH.to(torch.float32))).to(x_TNH.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """A short convolution over q, k and v, then a state that each token corrects by what it misses (Yang et al. 2024).

    Rows of requests with one row are computed together, all others piece by piece.
    """

    layer: int
    """Number among the layers that have a state."""
    shape: DeltaNetShape
    in_proj_qkvz: Linear
    in_proj_ba: Linear
    conv_weight_C1W: torch.Tensor
    dt_bias_N: torch.Tensor
    a_log_N: torch.Tensor
    norm: GatedRMSNorm
    out_proj: Linear
    states: StateCache

    def __call__(self, x_TD: torch.Tensor, rotation: Rotation, batch: Batch, prefix: str) -> torch.Tensor:
        """Return [T, D]; `prefix` starts the names of the taps."""
        qkvz, ba = self.in_proj_qkvz(x_TD), self.in_proj_ba(x_TD)
        batch.tap(prefix, "linear_attn.in_proj_qkvz", qkvz)
        batch.tap(prefix, "linear_attn.in_proj_ba", ba)
        qkv_TC, gate_TNH = self._split(qkvz)
        b_TN, a_TN = ba.view(len(ba), self.shape.num_key_heads, 2, -1).transpose(1, 2).flatten(2).unbind(1)
        decay_TN = -self.a_log_N.float().exp() * softplus(a_TN.float() + self.dt_bias_N)
        out_TNH = self._scan(qkv_TC, decay_TN, b_TN.sigmoid(), batch)
        batch.tap(prefix, "linear_attn.norm.input", out_TNH)
        normed_TNH = self.norm(out_TNH, gate_TNH)
        batch.tap(prefix, "linear_attn.norm", normed_TNH)
        out_TD = self.out_proj(normed_TNH.flatten(1))
        batch.tap(prefix, "linear_attn.out_proj", out_TD)
        return out_TD

    def _split(self, qkvz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q, k and v side by side, [T, C], and the gates [T, N, H]: the product has them by key head."""
        shape = self.shape
        by_head = qkvz.view(len(qkvz), shape.num_key_heads, -1)
        values = shape.value_size // shape.num_key_heads
        q, k, v, gate = by_head.split([shape.key_head_dim, shape.key_head_dim, values, values], dim=-1)
        qkv_TC = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=-1)
        return qkv_TC, gate.reshape(len(gate), shape.num_value_heads, shape.value_head_dim)

    def _scan(self, qkv_TC: torch.Tensor, decay_TN: torch.Tensor, beta_TN: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return what each row reads of its state, [T, N, H]."""
        num_single = batch.num_single
        groups = [batch.pieces[:num_single], *([piece] for piece in batch.pieces[num_single:])]
        outs = []
        for pieces in filter(None, groups):
            rows = slice(pieces[0].first_row, pieces[-1].stop_row)
            inputs = (x[rows].unflatten(0, (len(pieces), -1)) for x in (qkv_TC, decay_TN, beta_TN))
            outs.append(self._advance(pieces, *inputs).flatten(0, 1))
        return torch.cat(outs)

    def _advance(
        self, pieces: Sequence[Piece], qkv_RTC: torch.Tensor, decay_RTN: torch.Tensor, beta_RTN: torch.Tensor
    ) -> torch.Tensor:
        """Return [R, T, N, H] of pieces of equal length that do not go on from each other, and store their states."""
        conv_BCW, recurrent_BNAH = self.states.conv_LBCW[self.layer], self.states.recurrent_LBNAH[self.layer]
        numbers = [[piece.source for piece in pieces], [piece.target for piece in pieces]]
        sources, targets = torch.tensor(numbers, device=qkv_RTC.device)
        seen_RCX = torch.cat([conv_BCW[sources], qkv_RTC.transpose(1, 2)], dim=-1)
        conv_BCW[targets] = seen_RCX[..., -self.shape.kernel_size :]
        mixed_RCT = silu(conv1d(seen_RCX[..., 1:], self.conv_weight_C1W, groups=self.shape.conv_size))
        q, k, v = mixed_RCT.transpose(1, 2).split([self.shape.key_size] * 2 + [self.shape.value_size], dim=-1)
        out_RTNH, recurrent_BNAH[targets] = gated_delta_rule(
            self._heads(q), self._heads(k), v.unflatten(-1, (self.shape.num_value_heads, -1)), decay_RTN, beta_RTN,
            recurrent_BNAH[sources],
        )  # fmt: skip
        return out_RTNH

    def _heads(self, x_RTX: torch.Tensor) -> torch.Tensor:
        """Return [R, T, N, A]: each key head serves as many value heads as there are for one."""
        heads_RTGA = x_RTX.unflatten(-1, (self.shape.num_key_heads, -1))
        num_each = self.shape.num_value_heads // self.shape.num_key_heads
        heads_RTNA: torch.Tensor = heads_RTGA.repeat_interleave(num_each, dim=2)
        return heads_RTNA


def gated_delta_rule(
    q_RTNA: torch.Tensor,
    k_RTNA: torch.Tensor,
    v_RTNH: torch.Tensor,
    decay_RTN: torch.Tensor,
    beta_RTN: torch.Tensor,
    state_RNAH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each row reads, [R, T, N, H] in the dtype of v, and the state after the last, [R, N, A, H] float32.

    Each token t lets the state fade by exp(decay), corrects what it reads at k towards v by the share beta, and reads
    the state at q (Yang et al. 2024, Gated Delta Networks, equation 10). Several tokens' corrections, each of which
    sees those before it, are one triangular system (section 3.3).
    """
    q, k, v, decay, beta = (x.transpose(1, 2).float() for x in (q_RTNA, k_RTNA, v_RTNH, decay_RTN, beta_RTN))
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    outs, state = [], state_RNAH
    for start in range(0, q.shape[2], _MAX_CHUNK):
        chunk = slice(start, start + _MAX_CHUNK)
        out, state = _correct(
            q[:, :, chunk], k[:, :, chunk], v[:, :, chunk], decay[..., chunk], beta[..., chunk], state
        )
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2).to(v_RTNH.dtype), state


def _correct(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do so for tokens whose corrections are solved for together; all are [R, N, T, ...] in float32."""
    faded = decay.cumsum(-1)
    is_later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    between = (faded[..., :, None] - faded[..., None, :]).masked_fill(is_later, float("-inf")).exp()
    updated = (beta * faded.exp())[..., None] * k
    system = beta[..., None] * (k @ k.mT) * between
    missed = beta[..., None] * v - updated @ state
    corrections = torch.linalg.solve_triangular(system, missed, upper=False, unitriangular=True)
    out = (q * faded.exp()[..., None]) @ state + ((q @ k.mT) * between) @ corrections
    kept = k * (faded[..., -1:] - faded).exp()[..., None]
    return out, state * faded[..., -1].exp()[..., None, None] + kept.mT @ corrections


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def build_delta_net(parts: LayerParts) -> GatedDeltaNet:
    """Assemble the mixer of a layer."""
    config, states = parts.whole.config, parts.whole.states
    assert states is not None, "whoever builds the decoder of such a model gives it states"
    return GatedDeltaNet(
        layer=tuple(config.delta_nets).index(parts.layer),
        shape=config.delta_nets[parts.layer],
        in_proj_qkvz=parts.linear("linear_attn.in_proj_qkvz"),
        in_proj_ba=parts.linear("linear_attn.in_proj_ba"),
        conv_weight_C1W=parts.weight("linear_attn.conv1d.weight"),
        dt_bias_N=parts.weight("linear_attn.dt_bias"),
        a_log_N=parts.weight("linear_attn.A_log"),
        norm=GatedRMSNorm(parts.weight("linear_attn.norm.weight"), config.rms_norm_eps),
        out_proj=parts.linear("linear_attn.out_proj"),
        states=states,
    )
