"""Faults of wiring."""

from typing import Any

import torch
from torch.nn import functional

from harness.extensions.faults.fault import Category, Fault
from harness.extensions.faults.modules.changes import attribute, exchanged, forward, inputs, output, setting, weight
from harness.extensions.faults.modules.declaring import BF16, F16, FACTOR, declaring
from harness.extensions.faults.modules.norms import WEIGHT
from harness.extensions.faults.modules.rotary import L0

FAULTS: list[Fault] = []
fault = declaring(FAULTS, Category.WIRING)


def post_norm_first(model: Any) -> None:
    """A post-norm layer computed as a pre-norm one: attention reads the normed stream."""
    norm = model.model.layers[0].post_attention_layernorm
    inputs(L0, lambda x: type(norm).forward(norm, x))(model)


fault(
    "exaone4", "pre-norm", "attention reads the normed stream (a pre-norm layer)",
    r"layers\.0\.self_attn\.(q_proj|k_proj|v_proj|input)|layers\.0\.input", 0, "norm|input", post_norm_first,
    schedule="batched",
)  # fmt: skip
fault(
    "olmo2",
    "mlp-pre-norm",
    "the MLP reads the normed stream (a pre-norm layer)",
    r"layers\.0\.(mlp.*|attn_residual)",
    0,
    "norm|input",
    lambda model: inputs(
        "model.layers.0.mlp",
        lambda x: type(model.model.layers[0].post_feedforward_layernorm).forward(
            model.model.layers[0].post_feedforward_layernorm, x
        ),
        "x",
    )(model),
)
fault(
    "gpt_neox", "sequential-residual", "the residuals are sequential instead of parallel",
    r"layers\.0\.post_attention_layernorm", 0, "residual|parallel|sequential|input|attention",
    attribute("gpt_neox.layers.0", "use_parallel_residual", False), schedule="chunked:11",
)  # fmt: skip
fault(
    "gpt_neox", "parallel-residual", "the residuals are parallel instead of sequential",
    r"layers\.0\.(post_attention_layernorm.*|attn_residual|output)", 0, "residual|parallel|sequential|input|attention",
    attribute("gpt_neox.layers.0", "use_parallel_residual", True), settings={"use_parallel_residual": False},
    dtype=BF16,
)  # fmt: skip


def raw_mlp(model: Any) -> None:
    held: list[torch.Tensor] = []
    inputs("model.layers.0.input_layernorm", lambda x: held.append(x) or x, "input")(model)
    inputs("model.layers.0.mlp", lambda _: held[-1])(model)


fault(
    "phi", "mlp-without-norm", "the parallel MLP reads the stream before its norm", r"layers\.0\.mlp\.(fc1|input)", 0,
    "norm|input", raw_mlp,
)  # fmt: skip
fault(
    "falcon", "norms-of-branches-exchanged", "the norms of attention and MLP are exchanged", r"h\.0\.ln_attn", 0,
    WEIGHT, exchanged("transformer.h.0.ln_attn.weight", "transformer.h.0.ln_mlp.weight"),
    settings={"new_decoder_architecture": True, "num_kv_heads": 2}, schedule="batched",
)  # fmt: skip


def without_residual_factor(model: Any) -> None:
    output("model.layers.0.mlp", lambda out, *_: out / 0.6)(model)


fault(
    "granite", "residual-multiplier-on-attention-only", "the MLP's branch is added without residual_multiplier",
    r"layers\.0\.(output|mlp)", 0, FACTOR, without_residual_factor,
)  # fmt: skip
fault(
    "granite", "embedding-multiplier-twice", "embedding_multiplier is applied twice", r"layers\.0\.input|embed_tokens",
    0, FACTOR, attribute("model", "embedding_multiplier", 2.25), dtype=BF16, schedule="chunked:11",
)  # fmt: skip
fault(
    "granite", "logits-scaling-multiplies", "logits are multiplied by logits_scaling instead of divided", r"logits",
    None, FACTOR, setting("logits_scaling", 1 / 1.5), request=None,
)  # fmt: skip
fault(
    "cohere", "logit-scale-dropped", "logits are not scaled", r"logits", None, FACTOR,
    attribute("", "logit_scale", 1.0), request=None,
)  # fmt: skip
fault(
    "gemma2", "final-cap-dropped", "logits are not capped", r"logits", None, "cap",
    setting("final_logit_softcapping", None), request=None,
)  # fmt: skip
fault(
    "recurrent_gemma", "final-cap-30", "logits are capped at 30 instead of 3", r"logits", None, "cap",
    setting("logits_soft_cap", 30.0), request=None, dtype=F16,
)  # fmt: skip
fault(
    "falcon_h1", "gate-multiplier-dropped", "the gate of the MLP has no multiplier", r"layers\.0\.feed_forward\.act.*",
    0, FACTOR + "|gate|slope", attribute("model.layers.0.feed_forward", "gate_multiplier", 1.0), schedule="chunked:11",
)  # fmt: skip
fault(
    "falcon_h1", "ssm-out-multiplier-dropped", "the mixer's branch of layer 1 has no multiplier",
    r"layers\.1\.(pre_ff_layernorm\.input|attn_residual|mamba)", 0, FACTOR + "|branch",
    attribute("model.layers.1", "ssm_out_multiplier", 1.0), dtype=BF16,
)  # fmt: skip
fault(
    "falcon_h1", "key-multiplier-dropped", "keys have no multiplier", r"layers\.0\.(k_rope|self_attn\.k_proj)", 0,
    FACTOR, attribute(L0, "key_multiplier", 1.0),
)  # fmt: skip
fault(
    "falcon_h1", "multipliers-of-segments", "B has the multiplier of C", r"layers\.0\.mamba", 0,
    FACTOR + "|segment|B|input",
    weight("model.layers.0.mamba.mup_vector", lambda x: torch.where(x == x[..., 256:257], x[..., 288:289], x)),
    schedule="batched",
)  # fmt: skip
fault(
    "biogpt", "embedding-scale-dropped", "embeddings are not scaled", r"embed_tokens|layers\.0\.", 0, FACTOR,
    attribute("biogpt.embed_tokens", "embed_scale", 1.0), dtype=BF16,
)  # fmt: skip
fault(
    "recurrent_gemma", "embedding-normaliser-dropped", "embeddings are not scaled", r"layers\.0\.input|embed_tokens",
    0, FACTOR, weight("model.normalizer", lambda x: 0 * x + 1), schedule="chunked:11",
)  # fmt: skip
fault(
    "minimax", "beta-dropped", "the attention branch of layer 0 has a factor that the model does not know",
    r"layers\.0\.(attn_residual|.*input|post_attention_layernorm.*|output)", 0, FACTOR + "|residual|branch",
    attribute("model.layers.0", "attn_beta_factor", 0.5),
)  # fmt: skip


def normed_residual(self: Any, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
    normed = self.input_layernorm(hidden_states)
    hidden = normed + self.self_attn(hidden_states=normed, **named)[0]
    return hidden + self.mlp(self.post_attention_layernorm(hidden))


def mlp_only(self: Any, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
    hidden = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)[0]
    return self.mlp(self.post_attention_layernorm(hidden))


fault(
    "mixtral", "residual-of-the-normed", "the normed stream is added instead of the stream",
    r"layers\.1\.attn_residual", 0, "residual|norm|stream|branch|input", forward("model.layers.1", normed_residual),
)  # fmt: skip
fault(
    "olmoe", "residual-dropped", "the MLP's output stands for the sum", r"layers\.0\.output", 0,
    "residual|not added|left out|stream|branch|missing|alone", forward("model.layers.0", mlp_only), dtype=F16,
    schedule="batched",
)  # fmt: skip
fault(
    "arcee", "activation-not-squared", "ReLU instead of its square", r"layers\.0\.mlp\.(act.*|down_proj\.input)", 0,
    "relu|ReLU|activation|square", forward("model.layers.0.mlp.act_fn", lambda self, x: functional.relu(x)),
)  # fmt: skip
fault(
    "gpt_neox", "gelu-tanh", "GELU by its tanh formula", r"layers\.0\.mlp\.(act.*|dense_4h_to_h\.input)", 0,
    "tanh|gelu|GELU|activation",
    forward("gpt_neox.layers.0.mlp.act", lambda self, x: functional.gelu(x, approximate="tanh")),
    schedule="chunked:11",
)  # fmt: skip
fault(
    "diffllama", "lambda-of-the-next-layer", "lambda_init is that of the next layer",
    r"layers\.0\.(.*groupnorm.*|attention.*|.*o_proj.*)", 0, None,
    attribute(L0, "lambda_init", 0.8 - 0.6 * 2.718281828459045**-0.3),
)  # fmt: skip


def other_half(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    up, gate = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
    return self.down_proj(up * self.activation_fn(gate))


fault(
    "phi3", "gate-and-up-exchanged", "the activation is on the other half", r"layers\.0\.mlp\.(act.*|down_proj.*)", 0,
    "gate|up|half|exchang|swap", forward("model.layers.0.mlp", other_half),
)  # fmt: skip
