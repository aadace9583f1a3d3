"""Checkpoints whose rotary frequencies follow the length of a request, through the command, with faults."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness.engines import open_engine
from reference_engine.requests.admission import Admission
from reference_engine.requests.sequence import Sequence

ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.5, 3.5, 4.5],
    },
}  # fmt: skip
HEAD = "11,12,13,14,15,16,17,18"
SCHEDULES = "plain,chunked,batched,mixed,preempted,forked,rewound,speculative,tensor-parallel"


@pytest.fixture(scope="module", params=ROPES)
def model(request, tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.15, bos_token_id=None,
        eos_token_id=None, rope_parameters={"rope_theta": 500.0, **ROPES[request.param]},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp(request.param)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def check(harness, model):
    """Check a request of 15 tokens, one of 18 that begins likewise, and others if they are given; blocks of four."""

    def checked(schedules, *more):
        prompts = [item for tokens in (f"{HEAD},19", f"{HEAD},20,21,22,23", *more) for item in ("--token-ids", tokens)]
        command = ["check", "--model", model, *prompts, "--max-new-tokens", "7", "--schedule", schedules]
        return harness(*command, "--engine-option", "block_size=4", "--format", "json")

    return checked


@pytest.mark.slow
def test_every_schedule_passes_beyond_the_original_context(check):
    ran = check(SCHEDULES, "3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21")
    assert ran.status == 0, ran.out
    assert all("rope_extended" in run["coverage"]["triggers"] for run in ran.json["runs"])


def test_hf_says_that_its_decode_takes_another_length(model, checkpoints):
    notes = [open_engine("hf", folder, dtype="float32", device="cpu", options={}).capabilities.notes
             for folder in (model, checkpoints / "llama-tiny")]  # fmt: skip
    assert ["frequencies follow the length" in "".join(item) for item in notes] == [True, False]


@pytest.mark.slow
def test_a_cached_prefix_of_the_same_frequencies_passes(check):
    ran = check("prefix-hit")
    assert ran.status == 0, ran.out


@pytest.mark.slow
def test_frequencies_of_the_prompt_alone_are_found(check, model, monkeypatch):
    """Of the second request, whose prompt does not exceed the original context; of the first, they are right."""

    def of_prompt(self, num_prompt_tokens, params):
        return self.rope.rope_len(num_prompt_tokens)

    monkeypatch.setattr(Admission, "rope_len", of_prompt)
    ran = check("plain")
    divergence = ran.json["first_divergence"]
    assert (ran.status, divergence["tap"], divergence["request"]) == (1, "model.layers.0.q_rope", 1)
    assert divergence["explanation"]["num_rows"] == 17
    if model.name.startswith("longrope"):
        assert (
            divergence["explanation"]["cause"] == "rope scaling: the short factors are used where the long ones belong"
        )


def test_cached_keys_of_other_frequencies_are_found(check, monkeypatch):
    """Two blocks, position 0 aside, are judged a second time: as the past of the request that found them."""
    monkeypatch.setattr(Sequence, "prefix_salt", property(lambda self: self.params.prefix_salt))
    ran = check("prefix-hit")
    divergence = ran.json["first_divergence"]
    assert (ran.status, divergence["tap"], divergence["request"], divergence["position"]) == (
        1,
        "model.layers.0.q_rope",
        1,
        1,
    )
    assert "model.layers.0.k_rope is out of bounds in 14 of 58 rows" in str(ran.json["findings"])
