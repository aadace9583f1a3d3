"""An adapter in HF's model: in float64 it is the merged weights, and nothing else fits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from harness.errors import Code, HarnessError
from harness.oracle.lora import LoraLinear, add_adapter
from harness.oracle.model import load_model

from ..lora_adapter import FOLDER, write_adapter

IDS = torch.tensor([[1, 64, 155, 143, 3, 64]])
KEY = "base_model.model.model.layers.0.self_attn.q_proj"


def test_it_is_the_product_of_the_merged_weights(tmp_path):
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    hf = load_model(FOLDER, dtype=torch.float64, stays=True)
    base = hf.run(input_ids=IDS).logits
    add_adapter(hf, adapter)
    merged = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key in (key for key in tensors if key.endswith(".lora_A.weight")):
        module = key.removesuffix(".lora_A.weight")
        b = tensors[f"{module}.lora_B.weight"].double()
        merged.get_submodule(module.removeprefix("base_model.model.")).weight.data += 2.0 * b @ tensors[key].double()
    with torch.no_grad():
        expected = merged(IDS).logits
    assert torch.allclose(hf.run(input_ids=IDS).logits, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(base, expected, atol=0.1)
    assert sum(isinstance(module, LoraLinear) for module in hf.model.modules()) == 7 * 3


@pytest.mark.parametrize(
    ("settings", "modules", "says"),
    [
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 16.0}}, ("q_proj",), [4.0, 2.0, 2.0]),
        ({"use_rslora": True}, ("q_proj",), [4.0, 4.0, 4.0]),
    ],
)
def test_scales(tmp_path, settings, modules, says):
    hf = load_model(FOLDER, dtype=torch.float32, stays=True)
    add_adapter(hf, write_adapter(tmp_path / "adapter", seed=1, modules=modules, **settings))
    assert [layer.self_attn.q_proj.scaling for layer in hf.model.model.layers] == says


def swap(tensors):
    a, b = f"{KEY}.lora_A.weight", f"{KEY}.lora_B.weight"
    tensors[a], tensors[b] = tensors[b].T, tensors[a].T


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        (lambda c: c.update(peft_type="IA3"), None, "no LoRA"),
        (lambda c: c.update(use_dora=True), None, "variant that is not served"),
        (lambda c: c.update(bias="all"), None, "variant that is not served"),
        (lambda c: c.update(r=0), None, "r is impossible"),
        (lambda c: c.update(rank_pattern=[4]), None, "rank_pattern is impossible"),
        (lambda c: c.update(alpha_pattern={"q_proj": "8"}), None, "alpha_pattern is impossible"),
        (lambda c: c.update(alpha_pattern={"q_proj": 0}), None, "alpha_pattern is impossible"),
        (lambda c: c.update(r=8), None, "rank is not the one that its config states"),
        (None, swap, "do not fit the module"),
        (None, lambda t: t.pop(f"{KEY}.lora_B.weight"), "one of two tensors"),
        (None, lambda t: t.update({"base_model.model.model.norm.lora_A.weight": torch.ones(4, 96)}), "no linear one"),
        (None, lambda t: t.update({"base_model.model.nobody.lora_A.weight": torch.ones(4, 96)}), "no linear one"),
        (None, lambda t: t.update({"other.weight": torch.ones(1)}), "no part of a LoRA"),
        (None, dict.clear, "no weights"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path, config, tensors, says):
    folder = write_adapter(tmp_path / "adapter", seed=3)
    settings = json.loads((folder / "adapter_config.json").read_text())
    weights = load_file(folder / "adapter_model.safetensors")
    (config or dict)(settings)
    (tensors or dict)(weights)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(HarnessError, match=says) as caught:
        add_adapter(load_model(FOLDER, dtype=torch.float32, stays=True), folder)
    assert caught.value.code is Code.BAD_LORA


def test_a_folder_without_files(tmp_path):
    with pytest.raises(HarnessError, match="H119: the adapter's config cannot be read"):
        add_adapter(load_model(FOLDER, dtype=torch.float32, stays=True), tmp_path)
