"""Faults of experts."""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from harness.extensions.faults.fault import Category, Fault
from harness.extensions.faults.modules.changes import all_of, attribute, forward, names, output, weight, weight_of
from harness.extensions.faults.modules.declaring import BF16, EXPERT, FACTOR, declaring

FAULTS: list[Fault] = []
fault = declaring(FAULTS, Category.EXPERTS)


NORMAL = "normali|renormal|sum"


def softmax_router(*, is_normal: bool) -> Callable[..., Any]:
    def route(self: Any, hidden_states: torch.Tensor) -> Any:
        logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        values, chosen = torch.topk(functional.softmax(logits.float(), dim=-1), self.top_k, dim=-1)
        return logits, (values / values.sum(-1, keepdim=True) if is_normal else values).to(logits.dtype), chosen

    return route


M1 = "model.layers.1.mlp"
fault(
    "mixtral", "weights-not-renormalised", "the weights of the chosen experts are not renormalised",
    r"layers\.0\.mlp\.gate\.1", 0, NORMAL, forward("model.layers.0.mlp.gate", softmax_router(is_normal=False)),
)  # fmt: skip
fault(
    "olmoe", "weights-renormalised", "the weights of the chosen experts are renormalised, which this model does not",
    r"layers\.0\.mlp\.gate\.1", 0, NORMAL, attribute("model.layers.0.mlp.gate", "norm_topk_prob", True), dtype=BF16,
    schedule="chunked:11",
)  # fmt: skip
fault(
    "deepseek_v3", "routed-scaling-dropped", "routed_scaling_factor is left out", r"layers\.1\.mlp\.gate\.1", 0,
    FACTOR, attribute(M1 + ".gate", "routed_scaling_factor", 1.0),
)  # fmt: skip


def with_corrected_weights(model: Any) -> None:
    gate = model.get_submodule(M1 + ".gate")

    def change(out: Any, *_: Any) -> Any:
        logits, _weights, chosen = out
        scores_ = (logits.float().sigmoid() + gate.e_score_correction_bias).gather(1, chosen)
        return logits, (scores_ / scores_.sum(-1, keepdim=True) * gate.routed_scaling_factor).to(out[1].dtype), chosen

    output(M1 + ".gate", change)(model)


fault(
    "deepseek_v3", "corrected-weights", "the correction that chooses experts is in their weights, too",
    r"layers\.1\.mlp\.gate\.1", 0, "bias|correct|`scores` is `scores_for_choice`", with_corrected_weights, dtype=BF16,
)  # fmt: skip
fault(
    "glm4_moe", "correction-dropped", "experts are chosen without the correction", r"layers\.1\.mlp\.gate.*", None,
    "bias|correct|expert", weight(M1 + ".gate.e_score_correction_bias", lambda x: 0 * x), request=None,
)  # fmt: skip
fault(
    "glm4_moe", "groups-ignored", "experts are chosen from all groups", r"layers\.1\.mlp\.gate.*", None,
    "group|expert", attribute(M1 + ".gate", "topk_group", 2), request=None, dtype=BF16,
)  # fmt: skip
fault(
    "ernie4_5_moe", "one-expert", "one expert a token instead of two", r"layers\.1\.mlp.*", 0, "one|fewer|top|expert",
    attribute(M1 + ".gate", "top_k", 1), schedule="chunked:11",
)  # fmt: skip
fault(
    "granitemoe",
    "experts-exchanged",
    "two experts are exchanged",
    r"layers\.0\.block_sparse_moe.*",
    None,
    EXPERT,
    all_of(
        weight("model.layers.0.block_sparse_moe.experts.gate_up_proj", lambda w: w[[0, 1, 2, 5, 4, 3, 6, 7]]),
        weight("model.layers.0.block_sparse_moe.experts.down_proj", lambda w: w[[0, 1, 2, 5, 4, 3, 6, 7]]),
    ),
    request=None,
)
fault(
    "olmoe",
    "one-expert-gate-and-up",
    "one expert has gate and up exchanged",
    r"layers\.0\.mlp\.experts.*",
    None,
    EXPERT + "|gate",
    weight(
        "model.layers.0.mlp.experts.gate_up_proj",
        lambda w: torch.stack([x.roll(96, 0) if at == 2 else x for at, x in enumerate(w)]),
    ),
    request=None,
    dtype=BF16,
)
fault(
    "mixtral",
    "expert-dropped",
    "expert 3 is on a rank that adds nothing",
    r"layers\.0\.mlp\.experts.*",
    None,
    EXPERT,
    weight(
        "model.layers.0.mlp.experts.down_proj",
        lambda w: torch.stack([0 * x if at == 3 else x for at, x in enumerate(w)]),
    ),
    request=None,
    schedule="chunked:9",
)
fault(
    "jamba",
    "weights-renormalised",
    "the weights of the chosen experts are renormalised, which this model does not",
    r"layers\.0\.feed_forward\.(router.*|experts.*)",
    0,
    NORMAL + "|" + FACTOR,
    output(
        "model.layers.0.feed_forward.router",
        lambda out, *_: tuple(
            x / x.sum(-1, keepdim=True) if x.is_floating_point() and x.shape[-1] == 2 else x for x in out
        ),
    ),
)
fault(
    "qwen3_next", "shared-gate-without-sigmoid", "the shared expert's gate has no sigmoid", r"layers\.0\.mlp(\..*)?$",
    0, "gate|sigmoid|shared", names("model.layers.0.mlp", F=types.SimpleNamespace(sigmoid=lambda x: x)),
    schedule="chunked:11",
)  # fmt: skip


def routed_only(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    _, weights, chosen = self.gate(hidden_states)
    self.shared_experts(hidden_states)
    return self.experts(hidden_states.flatten(0, -2), chosen, weights).view_as(hidden_states)


fault(
    "deepseek_v3", "shared-expert-dropped", "the shared experts are not added", r"layers\.1\.mlp$", 0,
    "shared|not added|left out|expert", forward(M1, routed_only),
)  # fmt: skip
fault(
    "dbrx", "p-norm-2", "the experts' weights are normalised by their L2 norm", r"blocks\.0\.ffn.*", 0,
    NORMAL + "|" + FACTOR + "|norm", attribute("transformer.blocks.0.ffn", "moe_normalize_expert_weights", 2.0),
)  # fmt: skip
fault(
    "jetmoe", "expert-bias-dropped", "the bias behind the experts of attention is left out",
    r"layers\.0\.self_attention", 0, "bias|offset|constant",
    weight("model.layers.0.self_attention.experts.bias", lambda x: 0 * x), schedule="batched",
)  # fmt: skip
fault(
    "gpt_oss", "clamp-dropped", "the experts' activation is not clamped", r"layers\.0\.mlp\.experts", None,
    "clamp|limit|cap", attribute("model.layers.0.mlp.experts", "limit", 1e4), request=None,
)  # fmt: skip
fault(
    "gpt_oss", "alpha-1", "the experts' activation is SiLU instead of x * sigmoid(1.702 x)",
    r"layers\.0\.mlp\.experts", 0, "alpha|1\\.702|silu|SiLU|activation|slope",
    attribute("model.layers.0.mlp.experts", "alpha", 1.0), dtype=BF16, schedule="chunked:11",
)  # fmt: skip
fault(
    "minimax", "router-of-the-next-layer", "the router has the next layer's weight", r"layers\.0\.mlp\.gate", 0,
    "layer|weight", weight_of("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"), dtype=BF16,
)  # fmt: skip
fault(
    "phimoe", "softmax-for-sparsemixer", "weights are a softmax over the two chosen", r"layers\.0\.mlp\.router.*", 0,
    "softmax|weight|normali|router",
    output("model.layers.0.mlp.router", lambda out, *_: (out[0], out[0].gather(1, out[2]).softmax(-1), out[2])),
)  # fmt: skip
