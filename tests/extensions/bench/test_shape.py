"""Shapes: of the published sizes, and with weights that a seed gives again."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from harness.errors import Code, HarnessError
from harness.extensions.bench.shape import SHAPES, build_checkpoint, find_shape
from reference_engine import LLMEngine


@pytest.mark.parametrize(("name", "num_parameters"), [
    ("142m", 142_364_928),
    ("qwen3-0.6b", 596_049_920),
    ("qwen3-8b", 8_190_735_360),
])  # fmt: skip
def test_a_shape_has_the_parameters_of_its_name(name, num_parameters):
    with torch.device("meta"):
        model = Qwen3ForCausalLM(SHAPES[name].config())
    assert model.num_parameters() == num_parameters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_one_for_huggingface_and_for_the_engine(tmp_path, dtype):
    num_parameters = build_checkpoint(SHAPES["tiny"], tmp_path, dtype=dtype, seed=0, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.num_parameters() == num_parameters
    assert model.dtype == getattr(torch, dtype)
    assert LLMEngine(tmp_path).runner.dtype == getattr(torch, dtype)


def test_a_seed_gives_the_same_weights_and_another_one_others(tmp_path):
    weights = []
    for i, seed in enumerate((0, 0, 1)):
        build_checkpoint(SHAPES["tiny"], tmp_path / str(i), dtype="float32", seed=seed, device="cpu")
        weights.append(load_file(tmp_path / str(i) / "model.safetensors")["model.layers.1.mlp.up_proj.weight"])
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])
    assert weights[0].std() == pytest.approx(0.02, rel=0.05)


def test_an_unknown_shape():
    with pytest.raises(HarnessError, match="tiny, 142m") as caught:
        find_shape("huge")
    assert caught.value.code is Code.BAD_OPTION
