"""`golden`, `diff` and `profile`: the jobs of the command line, with Python's arguments."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import harness
from harness import Code
from harness.api import ProfileReport

from ..own_model import load

PROMPTS = [[1, 5, 6, 7, 8, 9], "hu rin"]


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return harness.golden("qwen3-tiny", prompts=PROMPTS, max_new_tokens=3, out=tmp_path_factory.mktemp("g") / "golden")


def test_a_golden_has_every_row_of_every_tap(golden):
    assert golden.recording.path.name == "golden"
    assert [request.prompt_length for request in golden.requests] == [6, 3]
    assert "model.layers.0.attention" in golden.graph
    assert set(golden.noise) > {operation.tap for operation in golden.graph if operation.kind == "linear"}


def test_a_golden_of_a_model_object_is_that_of_its_weights(golden, checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "qwen3-tiny", dtype=torch.float32)
    of_object = harness.golden(model, prompts=PROMPTS, max_new_tokens=3)
    expected, actual = (item.recording.steps[0].tap("lm_head") for item in (golden, of_object))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_recordings_are_compared_with_and_without_a_model(golden, tmp_path):
    harness.check("hf", model="qwen3-tiny", prompts=PROMPTS, max_new_tokens=3, schedules="plain", out=tmp_path / "out")
    for model in (None, "qwen3-tiny"):
        report = harness.diff(golden.recording.path, str(tmp_path / "out" / "plain"), model=model)
        report.assert_ok()
        judged = {tap.judged_by for tap in report.runs[0].taps}
        assert ("local" in judged) == (model is not None)
    with pytest.raises(harness.HarnessError) as caught:
        harness.diff(golden.recording.path, tmp_path / "out" / "plain", taps="nothing.*")
    assert "taps=" in str(caught.value)


@pytest.mark.slow
def test_a_profile_of_an_installed_engine_keeps_what_it_is_told_to(tmp_path):
    report = harness.profile(
        "reference",
        model="llama-tiny",
        prompt_tokens=8,
        max_new_tokens=3,
        num_runs=1,
        phases="decode",
        out=tmp_path / "profile",
    )
    assert isinstance(report, ProfileReport)
    assert [phase.name for phase in report.phases] == ["decode"]
    assert (tmp_path / "profile" / "report.html").exists()


@pytest.mark.slow
def test_a_profile_of_a_model_of_hfs(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "llama-tiny", dtype=torch.float32)
    report = harness.profile(model, prompt_tokens=8, max_new_tokens=3, num_runs=1)
    assert [phase.name for phase in report.phases] == ["prefill", "decode"]
    assert report.engine == "LlamaForCausalLM"


def test_a_module_of_the_user_has_no_steps_to_profile(checkpoints):
    with pytest.raises(harness.HarnessError) as caught:
        harness.profile(load(checkpoints / "qwen3-tiny"), model="qwen3-tiny")
    assert caught.value.code is Code.ENGINE_HAS_NO_STEPS
