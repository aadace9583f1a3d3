"""`--lora` in golden, run and diff: an adapter beside the weights, and one that was merged into them."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from harness.errors import Code

from ..unit.lora_adapter import FOLDER, write_adapter

ASKED = ("--prompt", "hu rin pun | hu", "--max-new-tokens", "2", "--dtype", "float32")


@pytest.fixture
def adapter(tmp_path):
    return write_adapter(tmp_path / "adapter", seed=1)


@pytest.fixture
def golden(harness, adapter, tmp_path):
    out = tmp_path / "golden"
    assert harness("golden", "--model", FOLDER, "--lora", adapter, *ASKED, "--out", out).status == 0
    return out


@pytest.fixture
def judged(harness, golden, adapter, tmp_path):
    def judge(*options):
        out = tmp_path / "recording"
        ran = harness("record", "--golden", golden, *options, "--out", out)
        assert ran.status == 0, ran.err
        return harness("diff", golden, out, "--model", FOLDER, "--lora", adapter, "--format", "json")

    return judge


def merged(adapter, folder, scale):
    """Write the base with scale * B A added to its weights: PEFT's merge has alpha / r = 2."""
    shutil.copytree(FOLDER, folder)
    weights, update = load_file(folder / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in weights:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in update:
            a, b = (update[f"{module}.lora_{part}.weight"].double() for part in "AB")
            weights[name] = (weights[name] + scale * (b @ a)).to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def cause(ran):
    return ran.json["first_divergence"]["explanation"]["cause"]


def test_an_engine_that_applies_it(judged, adapter):
    ran = judged("--engine", "reference", "--lora", adapter)
    assert ran.status == 0, ran.out


@pytest.mark.slow
def test_an_engine_that_was_not_told_of_it(judged):
    ran = judged("--engine", "reference")
    assert ran.status == 1
    assert cause(ran) == "the adapter is not applied"


@pytest.mark.slow
def test_a_sound_merge(judged, adapter, tmp_path):
    ran = judged("--engine", "hf", "--model", merged(adapter, tmp_path / "merged", scale=2.0))
    assert ran.status == 0, ran.out
    assert "ACTUAL was recorded from other weights" in ran.json["notes"][0]
    assert not any("another base" in note for note in ran.json["notes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "words"),
    [(8.0, "the adapter's scale is alpha, not divided by the rank"), (4.0, "the adapter is applied twice")],
)
def test_a_wrong_merge_is_named(judged, adapter, tmp_path, scale, words):
    ran = judged("--engine", "hf", "--model", merged(adapter, tmp_path / "merged", scale=scale))
    assert ran.status == 1
    assert words in cause(ran)


@pytest.mark.slow
def test_a_merge_into_another_base_is_named(judged, adapter, tmp_path):
    folder = merged(adapter, tmp_path / "merged", scale=2.0)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 1.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ran = judged("--engine", "hf", "--model", folder)
    assert ran.status == 1
    assert "model.norm.weight the first: the adapter was merged into another base" in ran.json["notes"][1]


def test_an_adapter_without_its_base(harness, golden, adapter):
    ran = harness("diff", golden, golden, "--lora", adapter)
    assert (ran.status, ran.err[:4]) == (2, Code.BAD_OPTION)
    assert "add --model BASE" in ran.err
