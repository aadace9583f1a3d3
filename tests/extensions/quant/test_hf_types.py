"""HuggingFace's quantised forms: what is refused, and that each truth has the weights that the kernels multiply."""

import importlib.util
import logging

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from harness.engines.hf import quantising
from harness.errors import Code, HarnessError
from harness.extensions.quant.forward import distance, hf_distributions
from harness.extensions.quant.hf_types import HF_TYPES, check_package, run_hf_type
from harness.oracle.model import load_model

SEQUENCES = [[1, *range(3, 40)]]
PROJECTIONS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
BITS = {
    "torchao-int8": 8, "torchao-int8-dynamic": 8, "torchao-int4": 4 + 2,
    "compressed-w8a8": 8, "compressed-w8a16": 8 + 1, "compressed-w4a16": 4 + 1,
}  # fmt: skip
"""Of a weight of a linear layer: a group of 32 has a scale of 32 bits, and torchao's int4 a smallest value besides."""
STEPS = {"torchao-int8": 254, "torchao-int8-dynamic": 254, "torchao-int4": 15, "compressed-w4a16": 15}
"""From one end of a group's range to the other; of the rest 255."""
ROUNDING = 1e-6
"""KL of sums in another order and of logarithms in float32: measured 7e-9; inputs in 8 bits cost 2e-3."""


def needs(name):
    package = HF_TYPES[name].package
    missing = importlib.util.find_spec(package) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{package} is not installed (extra quant)"))


@pytest.fixture(scope="module")
def hf(checkpoints):
    return load_model(checkpoints / "qwen3-tiny", dtype=torch.float32, stays=True)


ALL = [needs(name) for name in HF_TYPES]


def steps_of(name, weight):
    """Return the distance of neighbouring values in each group: [out, groups, 1]."""
    columns = HF_TYPES[name].columns
    groups = weight.unflatten(1, (-1, columns if columns > 1 else weight.shape[1]))
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    width = high - low if name == "torchao-int4" else 2 * torch.maximum(-low, high)
    return width / STEPS.get(name, 255)


@pytest.mark.parametrize("name", ALL)
def test_dequantised_weights_are_the_originals_rounded_to_steps(name, hf, tmp_path):
    with quantising(f"--types {name}"):
        _, dequantised = HF_TYPES[name].models(hf.checkpoint, tmp_path)
    for part in PROJECTIONS:
        path = f"model.layers.1.{part}"
        original, rounded = hf.module(path).weight, dequantised.module(path).weight
        steps = steps_of(name, original)
        error = ((rounded - original).unflatten(1, (steps.shape[1], -1)) / steps).abs()
        assert 0.49 < error.max() < 0.501
    assert torch.equal(hf.module("lm_head").weight, dequantised.module("lm_head").weight)


@pytest.mark.parametrize("name", ALL)
def test_costs_of_a_form(name, hf, tmp_path):
    run = run_hf_type(name, hf, SEQUENCES, tmp_path)
    assert distance(hf_distributions(hf, SEQUENCES), run.dequantised).mean > ROUNDING
    rounds_inputs = name in ("torchao-int8-dynamic", "compressed-w8a8")
    assert (distance(run.dequantised, run.engine).mean > ROUNDING) == rounds_inputs


@pytest.mark.parametrize("name", ALL)
def test_a_size_counts_what_is_stored(name, hf, tmp_path):
    run = run_hf_type(name, hf, SEQUENCES[:1], tmp_path)
    head = hf.model.get_output_embeddings()
    linear = [part for part in hf.model.modules() if isinstance(part, nn.Linear) and part is not head]
    quantised = sum(part.weight.numel() for part in linear)
    total = sum(parameter.numel() for parameter in hf.model.parameters())
    expected = BITS[name] * quantised + 32 * (total - quantised)
    assert run.size_bytes * 8 == pytest.approx(expected, rel=0.05)
    assert run.bits_per_weight == run.size_bytes * 8 / total


def test_a_shape_that_does_not_fit_is_named(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    hf = load_model(tmp_path, dtype=torch.float32, stays=True)
    with pytest.raises(HarnessError) as caught:
        run_hf_type("torchao-int4", hf, SEQUENCES, tmp_path)
    assert caught.value.code is Code.QUANTISER_REFUSED
    assert caught.value.what == "the shape of model.layers.0.mlp.gate_proj does not fit the type"
    assert (caught.value.expected, caught.value.actual) == (
        "inputs a multiple of 32, outputs of 16",
        "64 inputs, 172 outputs",
    )


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HarnessError) as caught:
        check_package("compressed-w4a16")
    assert caught.value.code is Code.PACKAGE_MISSING
    assert caught.value.where == "compressed_tensors"
    assert caught.value.hint == "pip install -e '.[quant]' in the harness's checkout"


def test_what_a_quantiser_raises_is_said_in_its_words_and_the_log_is_put_back():
    before = logging.root.manager.disable
    with pytest.raises(HarnessError) as caught, quantising("--types torchao-int8"):
        raise AssertionError("expect N to be dividable by 16")
    assert caught.value.code is Code.QUANTISER_REFUSED
    assert "AssertionError: expect N to be dividable by 16" in caught.value.what
    assert logging.root.manager.disable == before
