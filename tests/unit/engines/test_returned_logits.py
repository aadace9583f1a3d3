"""What an engine returns is what is judged as its logits, whatever product it made that of."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

import harness
from harness.engines.module.forward import ModuleStepper
from harness.results.check import Outcome

PROMPTS = [[5, 9, 14, 3, 8, 21], [7, 30, 4, 11, 2, 40, 13, 8, 9]]
MISTAKES = {
    "a gain of 1.5": lambda logits: 1.5 * logits,
    "a soft cap of 2": lambda logits: 2 * torch.tanh(logits / 2),
    "log probabilities": lambda logits: logits.log_softmax(dim=-1),
    "all but the largest left out": lambda logits: logits.where(logits == logits.amax(dim=-1, keepdim=True), -1e9),
    "one token moved by 0.05": lambda logits: logits + 0.05 * torch.eye(logits.shape[-1])[5].to(logits),
}


@pytest.fixture
def folder(checkpoints):
    return checkpoints / "qwen2-tiny"


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def returning(model, change):
    """Let the model return its logits changed."""
    forward = model.forward

    @functools.wraps(forward)
    def changed(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    model.forward = changed
    return model


def stepping(model, change):
    """An engine of steps, whose tensors are told by content."""
    stepper = ModuleStepper(returning(model, change), torch.device("cpu"))
    stepper.module = model
    return stepper


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("engine", [returning, stepping])
def test_what_is_done_to_them_is_found(model, folder, engine, mistake):
    report = check(engine(model, MISTAKES[mistake]), folder)
    assert report.runs[0].first_divergence.tap == "lm_head"
    assert report.outcome is Outcome.MISMATCH


@pytest.mark.parametrize("engine", [returning, stepping])
@pytest.mark.parametrize("change", [lambda logits: logits, torch.Tensor.double], ids=["as they are", "in float64"])
def test_the_same_logits_pass(model, folder, engine, change):
    report = check(engine(model, change), folder)
    assert report.outcome is Outcome.PASS
    assert {tap.name: tap.judged_by for tap in report.runs[0].taps}["lm_head"] == "local"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_16_bits_that_are_returned_in_float32_pass(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    assert check(stepping(model, torch.Tensor.float), folder).outcome is Outcome.PASS


def hides_its_arguments(model):
    """Wrap a forward as one that says nothing of what it takes."""
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    return model


def test_a_forward_that_hands_all_on_is_told_the_positions_of_a_padded_batch(model, folder):
    assert check(hides_its_arguments(model), folder, schedules=["batched"]).outcome is Outcome.PASS


def check(engine, folder, **options):
    return harness.check(
        engine, model=folder, prompts=PROMPTS, max_new_tokens=4, **({"schedules": ["plain"]} | options)
    )
