"""A mistake in the code of decode alone, of a mixer with a state: the code of the prompt is right."""

import inspect
from types import FunctionType, MethodType

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next

import harness
from harness.extensions.faults.zoo.models import build

PROMPTS = [list(range(5, 27)), list(range(60, 74))]
RULE = "torch_recurrent_gated_delta_rule"
RIGHT = inspect.unwrap(getattr(modeling_qwen3_next, RULE))


def without_decay(*tensors, g, **named):
    return RIGHT(*tensors, g=torch.zeros_like(g), **named)


def without_norm(*tensors, use_qk_l2norm_in_kernel, **named):
    return RIGHT(*tensors, use_qk_l2norm_in_kernel=False, **named)


def without_beta(*tensors, beta, **named):
    return RIGHT(*tensors, beta=torch.ones_like(beta), **named)


def explanation_of(family, folder, break_it):
    model = build(family, seed=7)
    model.save_pretrained(folder)
    break_it(model)
    report = harness.check(
        model, model=folder, prompts=PROMPTS, max_new_tokens=5, schedules=["plain"], explain_seconds=60
    )
    return report.first_divergence.explanation


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        (without_decay, "last_recurrent_state * decay_t` is left out"),
        (without_norm, "`use_qk_l2norm_in_kernel=True` is False"),
        (without_beta, "`(v_t - kv_mem) * beta_t` is `v_t - kv_mem`"),
    ],
)
def test_the_rule_of_decode(tmp_path, rule, changed):
    def break_it(model):
        mixer = model.model.layers[0].linear_attn
        right = inspect.unwrap(type(mixer).forward)
        wrong = FunctionType(right.__code__, {**right.__globals__, RULE: rule}, right.__name__, right.__defaults__)
        mixer.forward = MethodType(wrong, mixer)

    explanation = explanation_of("qwen3_next", tmp_path, break_it)
    assert explanation.is_cause
    assert explanation.cause.startswith("in decode alone: ")
    assert explanation.cause.endswith(changed)
    assert explanation.num_fitted == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "term"), [("dt_bias", "the bias is left out"), ("D", "the skip connection of the scan is left out")]
)
def test_a_parameter_that_decode_leaves_out(tmp_path, name, term):
    def break_it(model):
        mixer = model.backbone.layers[0].mixer
        forward, parameter = mixer.forward, getattr(mixer, name)
        right = parameter.data

        def called(hidden_states, **named):
            parameter.data = torch.zeros_like(right) if hidden_states.shape[1] == 1 else right
            output = forward(hidden_states, **named)
            parameter.data = right
            return output

        mixer.forward = called

    explanation = explanation_of("mamba2", tmp_path, break_it)
    assert explanation.is_cause
    assert explanation.cause.startswith(f"in decode alone: {term}: in mamba2_selective_state_update (")
