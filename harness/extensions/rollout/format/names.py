"""What trainers call the fields of a rollout: one table for all of them.

The names stand in verl's `DataProto`, TRL's `GRPOTrainer`, OpenRLHF's `Experience` and slime's `Sample` with its batch.
"""

FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "prompt": {
        "any": ("prompt_ids", "prompt_token_ids"),
        "verl": ("prompts",),
        "trl": ("prompt_ids",),
    },
    "response": {
        "any": ("response_ids", "response_token_ids", "completion_token_ids"),
        "verl": ("responses",),
        "trl": ("completion_ids",),
    },
    "sequence": {
        "any": ("token_ids",),
        "verl": ("input_ids",),
        "openrlhf": ("sequences",),
        "slime": ("tokens",),
    },
    "num_response": {"slime": ("response_length", "response_lengths")},
    "attention_mask": {"verl": ("attention_mask",), "openrlhf": ("attention_mask",)},
    "prompt_mask": {"trl": ("prompt_mask",)},
    "mask": {
        "any": ("mask",),
        "verl": ("response_mask",),
        "trl": ("completion_mask",),
        "openrlhf": ("action_mask",),
        "slime": ("loss_mask", "loss_masks"),
    },
    "tool_mask": {"trl": ("tool_mask",)},
    "engine": {
        "any": ("engine_logprobs", "logprobs"),
        "verl": ("rollout_log_probs",),
        "trl": ("sampling_per_token_logps",),
        "openrlhf": ("rollout_log_probs",),
        "slime": ("rollout_log_probs",),
    },
    "trainer": {
        "any": ("trainer_logprobs",),
        "verl": ("old_log_probs",),
        "trl": ("old_per_token_logps",),
        "openrlhf": ("action_log_probs",),
        "slime": ("log_probs",),
    },
    "experts": {"any": ("routed_experts",), "verl": ("routed_experts",), "slime": ("rollout_routed_experts",)},
    "weight_version": {"any": ("weight_version",), "slime": ("weight_versions",)},
    "trainer_version": {"any": ("trainer_weight_version",)},
    "pack": {"any": ("pack",)},
    "sampling": {"any": ("sampling_params",), "verl": ("meta_info",)},
}
"""By a field of ours, the names that it has; rows may mix those of several frameworks."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Of the sampling parameters, those that change the distribution; they stand in `sampling`, or in the row itself."""


def names_of(field: str) -> tuple[str, ...]:
    """Return all names of a field, ours first."""
    return tuple(dict.fromkeys(name for names in FIELDS[field].values() for name in names))
