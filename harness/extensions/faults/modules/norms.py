"""Faults of norms."""

from typing import Any

import torch
from torch.nn import functional

from harness.extensions.faults.fault import Category, Fault
from harness.extensions.faults.modules.changes import attribute, exchanged, forward, weight, weight_of
from harness.extensions.faults.modules.declaring import BF16, F16, declaring
from harness.extensions.faults.modules.rotary import L0

FAULTS: list[Fault] = []
fault = declaring(FAULTS, Category.NORM)


def per_head(self: Any, x: torch.Tensor) -> torch.Tensor:
    heads = x.unflatten(-1, (-1, 16)).float()
    return (
        self.weight.float()
        * (heads * (heads.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()).flatten(-2)
    ).to(x.dtype)


def rms(self: Any, x: torch.Tensor, *_: Any) -> torch.Tensor:
    eps = getattr(self, "eps", None) or self.variance_epsilon
    fine = x.float()
    done = self.weight.float() * (fine * (fine.pow(2).mean(-1, keepdim=True) + eps).rsqrt())
    return (done if getattr(self, "bias", None) is None else done + self.bias.float()).to(x.dtype)


def same(self: Any, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x


WEIGHT = r"weight|scale|norm|parameter"
SKIPPED = (
    r"not applied|skipped|left out|identity|is the input|unchanged|no norm|without|passes|its input|not normed|input"
)
fault(
    "olmo2", "norm-per-head", "the norm of queries is per head instead of over all", r"layers\.0\.self_attn\.q_norm",
    0, "head|group", forward(L0 + ".q_norm", per_head), schedule="chunked:11",
)  # fmt: skip
fault(
    "persimmon", "mean-not-taken", "a LayerNorm does not take the mean off", r"layers\.0\.input_layernorm", 0,
    "mean|RMS", forward("model.layers.0.input_layernorm", rms),
)  # fmt: skip
fault(
    "cohere", "mean-not-taken", "the LayerNorm is an RMSNorm", r"layers\.0\.input_layernorm", 0, "mean|RMS",
    forward("model.layers.0.input_layernorm", rms), dtype=F16,
)  # fmt: skip
fault(
    "starcoder2", "norm-bias-dropped", "the bias of a norm is left out", r"layers\.0\.post_attention_layernorm", 0,
    "bias", weight("model.layers.0.post_attention_layernorm.bias", lambda x: 0 * x), dtype=BF16, schedule="batched",
)  # fmt: skip
fault(
    "nemotron", "weight-without-one", "the norm's weight is used without the one", r"layers\.0\.input_layernorm", 0,
    WEIGHT + "|1", weight("model.layers.0.input_layernorm.weight", lambda x: x - 1),
)  # fmt: skip
fault(
    "gemma2", "final-weight-without-one", "the last norm's weight is used without the one", r"model\.norm", None,
    WEIGHT + "|1", weight("model.norm.weight", lambda x: x - 1), request=None,
)  # fmt: skip
fault(
    "glm4", "sandwich-norms-exchanged", "the norms behind attention and behind the MLP are exchanged",
    r"layers\.0\.post_self_attn_layernorm", 0, WEIGHT,
    exchanged("model.layers.0.post_self_attn_layernorm.weight", "model.layers.0.post_mlp_layernorm.weight"),
)  # fmt: skip
fault(
    "glm4", "sandwich-norm-skipped", "the norm behind attention is skipped", r"layers\.0\.post_self_attn_layernorm", 0,
    SKIPPED, forward("model.layers.0.post_self_attn_layernorm", same), dtype=BF16,
)  # fmt: skip
fault(
    "gemma2", "norm-of-the-other-site", "the norm behind the MLP has the weight of the one before it",
    r"layers\.0\.post_feedforward_layernorm", 0, WEIGHT,
    weight_of("model.layers.0.post_feedforward_layernorm.weight", "model.layers.0.pre_feedforward_layernorm.weight"),
    dtype=BF16, schedule="batched",
)  # fmt: skip
fault(
    "olmo", "eps-1e-3", "the eps of a norm without weight is 1e-3", r"layers\.0\.input_layernorm", 0, "eps",
    forward("model.layers.0.input_layernorm", lambda self, x: functional.layer_norm(x, (64,), eps=1e-3)),
)  # fmt: skip
fault(
    "mamba", "final-eps", "the eps of the last norm is 1e-3", r"norm_f", None, "eps",
    attribute("backbone.norm_f", "variance_epsilon", 1e-3), request=None,
)  # fmt: skip
fault(
    "falcon_h1", "norm-of-the-layer-before", "layer 1 has layer 0's norm", r"layers\.1\.input_layernorm", 0,
    WEIGHT + "|layer", weight_of("model.layers.1.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
    dtype=BF16,
)  # fmt: skip
fault(
    "dbrx",
    "norms-exchanged",
    "the two norms of a layer are exchanged",
    r"blocks\.0\.norm_attn_norm\.norm_1",
    0,
    WEIGHT,
    exchanged("transformer.blocks.0.norm_attn_norm.norm_1.weight", "transformer.blocks.0.norm_attn_norm.norm_2.weight"),
)
fault(
    "bitnet", "sub-norm-skipped", "the norm before o_proj is skipped", r"layers\.0\.self_attn\.attn_sub_norm", 0,
    SKIPPED, forward(L0 + ".attn_sub_norm", same), schedule="batched",
)  # fmt: skip
fault(
    "stablelm", "norm-heads-reversed", "the weights of the heads' norms are in reverse order",
    r"layers\.0\.self_attn\.q_layernorm.*", 0, WEIGHT + "|head|order",
    exchanged(L0 + ".q_layernorm.norms.0.weight", L0 + ".q_layernorm.norms.3.weight"), settings={"qk_layernorm": True},
)  # fmt: skip
fault(
    "jamba", "dt-norm-skipped", "the norm of the scan's steps is skipped",
    r"layers\.0\.mamba\.dt_layernorm|layers\.0\.mamba", 0, SKIPPED + "|step|dt",
    forward("model.layers.0.mamba.dt_layernorm", same), schedule="chunked:11",
)  # fmt: skip


def gate_last(self: Any, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
    groups = x.float().unflatten(-1, (-1, self.group_size))
    done = self.weight.float() * (
        groups * (groups.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
    ).flatten(-2)
    return (done * functional.silu(gate.float())).to(x.dtype)


fault(
    "mamba2", "gate-after-norm", "the gate is multiplied after the norm instead of before", r"layers\.0\.mixer\.norm",
    0, "gate|order|before|after", forward("backbone.layers.0.mixer.norm", gate_last),
)  # fmt: skip
fault(
    "mamba2", "gate-skipped", "the gate of the norm is left out", r"layers\.0\.mixer\.norm", 0, "gate",
    forward("backbone.layers.0.mixer.norm", lambda self, x, gate=None: type(self).forward(self, x, None)), dtype=BF16,
)  # fmt: skip
