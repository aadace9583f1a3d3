"""Settings of GGUF files: each is read, known to change nothing, or refused by its name."""

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.architecture import _NEUTRAL, _WITHOUT_EFFECT, FAMILIES, Metadata, hf_config

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (extra test or llamacpp)")
SIZES = {
    "context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 48,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
NO_YARN = {"rope.scaling.original_context_length"}
"""Read by llama.cpp, which computes with it under yarn only."""


def keys(place=gguf.constants.Keys):
    """Every setting of an architecture that the package gguf has a name for, without the architecture."""
    for name, value in vars(place).items():
        if isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.")
        elif isinstance(value, type) and not name.startswith("_"):
            yield from keys(value)


def config(architecture="llama", rope_factors=None, **settings):
    values = {f"{architecture}.{key}": value for key, value in (SIZES | settings).items() if value is not None}
    metadata = Metadata({"general.architecture": architecture, **values}, "model.gguf")
    return hf_config(metadata, vocab_size=8, is_tied=True, rope_factors=rope_factors)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("key", sorted({*keys(), "rope.scale_linear", "a_setting_of_tomorrow"}))
def test_no_setting_is_left_out(architecture, key):
    plain = config(architecture)
    for value in (7, 3, -1, 0.7, -0.5, True, False, "odd", [1, 2], ["a"], float("nan"), float("inf")):
        refusal = refusable(architecture, **{key: value})
        is_neutral = key in _WITHOUT_EFFECT | NO_YARN or (key in _NEUTRAL and value in _NEUTRAL[key])
        assert refusal != plain or is_neutral, (key, value)


def refusable(architecture, **settings):
    """Return the configuration, or None where the settings are refused."""
    try:
        return config(architecture, **settings)
    except HarnessError as error:
        if error.code not in (Code.UNSUPPORTED_GGUF, Code.DAMAGED_GGUF) or f"{architecture}." not in str(error.where):
            raise
        return None


@pytest.mark.parametrize(
    ("settings", "key", "actual"),
    [
        ({"rope.dimension_count": 4}, "rope.dimension_count", "4"),
        ({"attention.key_length": 16}, "attention.value_length", "None"),
        ({"attention.value_length": 16}, "attention.value_length", "16"),
        ({"attention.causal": False}, "attention.causal", "False"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "50.0"),
        ({"attention.clamp_kqv": 8.0}, "attention.clamp_kqv", "8.0"),
        ({"attention.scale": 1.0}, "attention.scale", "1.0"),
        ({"expert_count": 8}, "expert_count", "8"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type", "'longrope'"),
        ({"rope.scaling.attn_factor": 1.2}, "rope.scaling.attn_factor", "1.2"),
    ],
)
def test_a_refusal_names_the_setting_and_its_value(settings, key, actual):
    with pytest.raises(HarnessError, match="H101: a setting of the model is not read") as caught:
        config(**settings)
    assert (caught.value.where, caught.value.actual) == (f"model.gguf: llama.{key}", actual)


@pytest.mark.parametrize(
    "settings",
    [
        {"attention.causal": True, "attention.clamp_kqv": 0.0, "logit_scale": 1.0, "expert_count": 0},
        {"attention.key_length": 8, "attention.value_length": 8, "rope.dimension_count": 8, "vocab_size": 9},
        {"rope.scaling.type": "none", "rope.scaling.factor": 8.0},
        {"rope.scaling.type": "linear"}, {"rope.scaling.factor": 1.0}, {"rope.scaling.factor": 0.0},
        {"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}, {"rope.scaling.original_context_length": 8},
    ],
)  # fmt: skip
def test_settings_that_change_nothing(settings):
    assert config(**settings) == config()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 2.0, "rope.scaling.factor": 3.0}, {"rope_type": "linear", "factor": 3.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
             "beta_slow": 1.0},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_beta_fast": 16.0,
             "rope.scaling.original_context_length": 32},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 16.0,
             "beta_slow": 1.0},
        ),
    ],
)  # fmt: skip
def test_rotary_scaling_is_what_llama_cpp_makes_of_it(settings, expected):
    assert config(**settings)["rope_parameters"] == {"rope_theta": 10000.0, **expected}


def test_frequencies_are_divided_in_one_family_only():
    assert config(rope_factors=[1.0] * 4) == config()
    with pytest.raises(HarnessError, match="not those of Llama 3's scaling"):
        config("qwen2", rope_factors=[1.0, 1.0, 8.0, 8.0])
    with pytest.raises(HarnessError, match="not those of Llama 3's scaling"):
        config(rope_factors=[1.0, 1.0, 8.0, 7.0])
