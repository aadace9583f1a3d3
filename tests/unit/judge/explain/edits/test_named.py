"""Mistakes of other families' code and weights are named by changes of what HF runs, in the field's terms."""

import pytest
import torch
from torch import nn

import harness
from harness.extensions.faults.zoo.models import build

FLOAT8 = torch.float8_e4m3fn
PROMPTS = [list(range(5, 40)), list(range(60, 80))]


def setting(path, name, value):
    return lambda model: setattr(model.get_submodule(path), name, value)


def parameter(name, change):
    def plant(model):
        held = model.get_parameter(name)
        held.data = change(held.data.clone())

    return plant


def weights_of(path, source):
    return lambda model: model.get_submodule(path).load_state_dict(model.get_submodule(source).state_dict())


def skipped(path):
    return lambda model: setattr(model.get_submodule(path), "forward", lambda x: x)


def gated_after(model):
    norm = model.get_submodule("backbone.layers.0.mixer.norm")

    def forward(x, gate):
        groups = x.unflatten(-1, (-1, norm.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * normed.flatten(-2) * nn.functional.silu(gate)

    norm.forward = forward


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("family", "plant", "cause"),
    [
        ("granite", setting("model.layers.0", "residual_multiplier", 1.0), "multiplier of the branch is left out"),
        ("olmoe", setting("model.layers.0.mlp.gate", "norm_topk_prob", True), "weights are normalised to a sum of one"),
        ("deepseek_v3", setting("model.layers.1.mlp.gate", "routed_scaling_factor", 1.0), "routed scaling factor is"),
        ("gpt_oss", setting("model.layers.0.mlp.experts", "alpha", 1.0), "`gate * self.alpha` is `gate`"),
        ("glm4", skipped("model.layers.0.post_self_attn_layernorm"), "the norm is skipped"),
        ("mamba2", gated_after, "`if gate is not None` comes after"),
        (
            "mamba2",
            parameter("backbone.layers.0.mixer.dt_bias", torch.zeros_like),
            "dt_bias of backbone.layers.0.mixer is zero",
        ),
        (
            "starcoder2",
            weights_of("model.layers.0.mlp.c_proj", "model.layers.1.mlp.c_proj"),
            "the weights are those of model.layers.1.mlp.c_proj",
        ),
        ("olmo", weights_of("lm_head", "model.embed_tokens"), "tied to the embedding"),
        ("opt", parameter("model.decoder.layers.0.self_attn.out_proj.weight", torch.t), "is transposed"),
        ("glm4", parameter("model.layers.0.self_attn.k_proj.bias", torch.zeros_like), "is zero: left out"),
        ("gemma2", parameter("model.norm.weight", lambda x: x - 1), "is applied less one"),
        ("gemma2", parameter("model.norm.weight", lambda x: x.to(FLOAT8).to(x)), "is rounded to float8_e4m3fn"),
        (
            "exaone4",
            weights_of("model.layers.1.self_attn.k_norm", "model.layers.0.self_attn.q_norm"),
            "the weights are those of model.layers.0.self_attn.q_norm",
        ),
        ("mamba", parameter("backbone.layers.0.mixer.A_log", lambda x: x + 0.3), "is scaled by 1.35"),
        (
            "mamba",
            parameter("backbone.layers.0.mixer.conv1d.weight", lambda x: x.flip(2)),
            "has its kernel taps in another order: reversed",
        ),
    ],
)
def test_a_mistake_is_named(tmp_path, family, plant, cause):
    model = build(family, seed=7)
    model.save_pretrained(tmp_path)
    plant(model)
    report = harness.check(
        model, model=tmp_path, prompts=PROMPTS, max_new_tokens=2, schedules=["plain"], explain_seconds=60.0
    )
    explanation = report.first_divergence.explanation
    assert explanation.is_cause
    assert cause in explanation.cause


OUTPUT = "model.layers.1.output"
BRANCH, STREAM = "model.layers.1.mlp.down_proj", "model.layers.1.attn_residual"


@pytest.mark.parametrize(
    ("cause", "make"),
    [
        (
            "the residual is taken after the norm, or the norm overwrites it in place",
            lambda tap: tap("model.layers.1.post_attention_layernorm") + tap(BRANCH),
        ),
        ("the residual is in bfloat16", lambda tap: tap(STREAM).bfloat16().double() + tap(BRANCH)),
        (
            "the addition is of values in float16",
            lambda tap: tap(STREAM).half().double() + tap(BRANCH).half().double(),
        ),
    ],
)
def test_a_sum_of_a_recording_is_named(bench, cause, make):
    explanation = bench.explain(OUTPUT, make(bench.tap))
    assert explanation.is_cause
    assert explanation.cause.startswith(f"{cause}: in Qwen3DecoderLayer (modeling_qwen3.py:")
    assert "your engine computes what HF computes with this change" in explanation.detail
