"""An engine's settings against HF's before anything runs: found where they differ, and no alarm where none does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from harness.engines.module import TorchEngine
from harness.errors import Code, HarnessError
from harness.extensions.faults.zoo.models import save
from harness.formats.case import RequestSpec
from harness.judge.jobs.check import run_check
from harness.judge.jobs.settings import compare_settings, hf_settings, run_settings
from harness.oracle.model import load_model
from harness.plan import plan_engine, plan_request
from harness.results.check import Outcome
from harness.results.settings import ModelSettings
from reference_engine.checkpoint.families import FAMILIES
from reference_engine.checkpoint.model_config import ModelConfig

CHECKPOINTS = Path(__file__).parents[4] / "cases" / "checkpoints"
EMBEDDED = sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json"))
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def plant(monkeypatch, **changes):
    """Let the reference engine read other values than config.json has."""
    read = ModelConfig.from_dict.__func__

    def changed_config(cls, *args, **kwargs):
        config = read(cls, *args, **kwargs)
        return replace(config, **{name: change(getattr(config, name)) for name, change in changes.items()})

    monkeypatch.setattr(ModelConfig, "from_dict", classmethod(changed_config))


FAULTS = {
    "rms_norm_eps": (lambda _eps: 1e-3, ["the engine has norm eps 0.001, HF has 1e-06"]),
    "rope": (lambda rope: replace(rope, theta=5e5), ["the engine has rope theta 500000, HF has 1000000"]),
    "local_rope": (lambda _rope: None, []),  # HF has it, and the engine may have it elsewhere
    "layer_windows": (
        lambda windows: (None, *windows[1:]),
        ["the engine has sliding layers 1, 2, 3, 4, HF has 0, 1, 2, 3, 4"],
    ),
    "tie_word_embeddings": (lambda _tied: False, ["the engine has tied head False, HF has True"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_setting_that_the_reference_engine_reads_otherwise(monkeypatch, name):
    change, messages = FAULTS[name]
    plant(monkeypatch, **{name: change})
    assert [str(pair) for pair in run_settings(plan_engine(model="gemma3-tiny")).differing] == messages


@pytest.mark.sampled(4)
@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("name", EMBEDDED)
def test_no_alarm_on_an_embedded_checkpoint(name, isolate):
    result = run_settings(plan_engine(model=name, isolate=isolate))
    assert result.differing == []
    assert result.num_compared >= 11


@pytest.mark.parametrize("name", FAMILIES)
def test_no_alarm_on_a_tiny_model_of_each_family_that_the_reference_engine_serves(name, tmp_path):
    save(name, tmp_path)
    result = run_settings(plan_engine(model=str(tmp_path), dtype="float32"))
    assert result.differing == []
    assert result.num_compared >= 10


def test_a_window_that_no_prompt_reaches_is_found_though_every_row_is_right(monkeypatch):
    plant(monkeypatch, layer_windows=lambda windows: tuple(window and 2 * window for window in windows))
    plan = plan_request(
        model="gemma3-tiny",
        requests=[RequestSpec(token_ids=[1, 4, 5, 6]), RequestSpec(token_ids=[1, 7])],
        max_new_tokens=2,
        schedules=["plain", "batched"],
    )
    result = run_check(plan)
    assert result.outcome is Outcome.MISMATCH
    assert result.first_divergence is None
    assert [[str(finding.message) for finding in run.findings] for run in result.runs] == [
        ["the engine has sliding window 64, HF has 32"]
    ] * 2
    assert {finding.code for run in result.runs for finding in run.findings} == {Code.SETTING_DIFFERS}
    assert all(not tap.verdict.is_wrong for run in result.runs for tap in run.taps)


class Shows:
    """An engine that shows what it is given."""

    name = "shows"

    def __init__(self, shown):
        self.shown = shown

    def resolved_settings(self):
        return self.shown


@pytest.fixture(scope="module")
def plan():
    return plan_engine(model="llama-tiny")


@pytest.fixture(scope="module")
def hf(plan):
    return load_model(plan.folder, dtype=torch.float32)


def test_an_engine_that_shows_nothing_has_nothing_compared(plan, hf):
    for engine in (object(), Shows(ModelSettings())):
        result = compare_settings(plan, engine, hf)
        assert (result.differing, result.num_compared) == ([], 0)


def test_what_is_no_settings_is_refused(plan, hf):
    with pytest.raises(HarnessError) as caught:
        compare_settings(plan, Shows({"norm_eps": 1e-6}), hf)
    assert str(caught.value).startswith("H017: resolved_settings returns another type\n")


def test_a_module_with_another_eps_and_theta(plan, hf):
    model = AutoModelForCausalLM.from_pretrained(plan.folder, local_files_only=True)
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.variance_epsilon = 1e-6
    model.model.rotary_emb.inv_freq *= 0.5
    result = compare_settings(plan, TorchEngine(model, device="cpu"), hf)
    assert [str(pair) for pair in result.differing] == [
        "the engine has norm eps 1e-06, HF has 1e-05",
        "the engine's rotary frequencies are not HF's: pair 0 of 16 turns by 0.5 radians a position, HF's by 1",
    ]


def test_a_module_without_any_standard_name(plan, hf):
    result = compare_settings(plan, TorchEngine(Plain(), device="cpu"), hf)
    assert (result.differing, result.num_compared) == ([], 0)


class Plain(nn.Module):
    def forward(self, input_ids):
        return input_ids


@pytest.mark.parametrize("name", ROPES)
def test_a_scaling_that_is_ignored_is_found_by_the_frequencies(name, tmp_path):
    config = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "qwen3-tiny", local_files_only=True).config
    config.rope_parameters = {"rope_theta": 1e6, **ROPES[name]}
    scaled = AutoModelForCausalLM.from_config(config)
    scaled.save_pretrained(tmp_path)
    config.rope_parameters = {"rope_theta": 1e6, "rope_type": "default"}
    plan = plan_engine(model=str(tmp_path), dtype="float32")
    hf = load_model(tmp_path, dtype=torch.float32)
    ignoring = AutoModelForCausalLM.from_config(config)
    assert compare_settings(plan, TorchEngine(scaled, device="cpu"), hf).differing == []
    (pair,) = compare_settings(plan, TorchEngine(ignoring, device="cpu"), hf).differing
    assert str(pair).startswith("the engine's rotary frequencies are not HF's: pair ")


def test_frequencies_that_follow_the_length_are_left_out(tmp_path):
    config = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "qwen3-tiny", local_files_only=True).config
    config.rope_parameters = {"rope_theta": 1e6, "rope_type": "dynamic", "factor": 2.0}
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = hf_settings(load_model(tmp_path, dtype=torch.float32))
    assert (settings.rope_theta, settings.rope_frequencies) == ((), ())
