"""Which entries of transformers' causal-LM mapping are decoder-only text models, by rule, and why the others are not.

An entry counts through its text configuration: `gemma3` (with a vision tower) and `gemma3_text` are one architecture.
"""

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from harness.extensions.faults.zoo.quiet import quiet

MULTIMODAL = {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}

NOT_CAUSAL = {
    "cpmant": "a later token changes earlier logits: the context is attended to in both directions",
    "xlnet": "a later token changes earlier logits: attention has two directions unless a permutation is given",
}
"""Found by trial: test_zoo.py tries every architecture, and these."""


def architectures() -> list[str]:
    """Return the model types that are decoder-only text models, in alphabetical order."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(excluded()))


def excluded() -> dict[str, str]:
    """Return the model types that are not, in alphabetical order, each with the reason in one line."""
    with quiet():
        reasons = {name: why_not(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def why_not(model_type: str) -> str | None:
    """Say why an entry of the mapping is not a decoder-only text model of its own, or None if it is one."""
    try:
        whole = AutoConfig.for_model(model_type)
        config = whole.get_text_config()
    except Exception as error:
        return f"no text configuration by default: {one_line(error)}"
    if whole.is_encoder_decoder:
        return "encoder-decoder (is_encoder_decoder)"
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES or has_decoder_flag(config):
        return "encoder that can be run as a decoder (is_decoder, or in the masked-LM mapping)"
    if hasattr(config, "cross_attention_hidden_size"):
        return "decoder half of an encoder-decoder (cross_attention_hidden_size)"
    if config.model_type != model_type:
        return other_name(config)
    if model_type in MULTIMODAL:
        return "vision or audio inside the model, and no text configuration"
    return NOT_CAUSAL.get(model_type)


def has_decoder_flag(config: PreTrainedConfig) -> bool:
    """Tell encoders such as BERT: `is_decoder` is there and off, and cross-attention can be added."""
    return getattr(config, "is_decoder", None) is False and hasattr(config, "add_cross_attention")


def other_name(text_config: PreTrainedConfig) -> str:
    """Say under which name an entry counts, from its text configuration."""
    if text_config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"counts as {text_config.model_type}"
    return f"AutoModelForCausalLM does not take its text configuration, {type(text_config).__name__}"


def one_line(error: Exception) -> str:
    """Return an error's type and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
