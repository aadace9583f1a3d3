"""Keys and values of another request, in engines that have no block table to say so."""

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import harness

PROMPTS = [list(range(5, 25)), list(range(60, 72))]


def of_the_first(shift):
    """Return attention in which the second request of a padded batch reads the first one, so many columns before."""

    def attend(module, query, key, value, mask, **named):
        key, value = (torch.cat([x[:1], *[x[:1].roll(shift, 2)] * (len(x) - 1)]) for x in (key, value))
        return sdpa_attention_forward(module, query, key, value, mask, **named)

    return attend


@pytest.mark.parametrize(
    ("shift", "first"),
    [(0, 8), (8, 0)],  # the shorter prompt is padded with so many
)
def test_the_first_request_of_a_batch_is_read_by_all(checkpoints, shift, first):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "llama-tiny", dtype=torch.float32).eval()
    name = f"first_{shift}"
    AttentionInterface.register(name, of_the_first(shift))
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)
    report = harness.check(
        model, model=checkpoints / "llama-tiny", prompts=PROMPTS, max_new_tokens=2, schedules=["batched"]
    )
    assert report.first_divergence is not None
    assert report.first_divergence.request == 1
    explanation = report.first_divergence.explanation
    assert (explanation.cause, explanation.is_cause) == (
        "reads its history from slots that another request wrote",
        True,
    )
    assert explanation.detail.startswith(f"request 1, position 0 reads position 0 as request 0, position {first}")
