"""An adapter in HF's model: in float64 it is the merged weights, and nothing else fits."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from harness.errors import Code, HarnessError
from harness.oracle.lora import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoraLinear,
    _check_shapes,
    add_adapter,
    load_adapted,
    read_adapter,
)
from harness.oracle.model import load_model

from ..lora_adapter import FOLDER, write_adapter

IDS = torch.tensor([[1, 64, 155, 143, 3, 64]])
FILES = (CONFIG_FILE, WEIGHTS_FILE)
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


def pair_at(path):
    """Add A and B of a module to an adapter's tensors."""
    a, b = f"base_model.model.{path}.lora_A.weight", f"base_model.model.{path}.lora_B.weight"
    return lambda tensors: tensors.update({a: torch.ones(4, 96), b: torch.ones(96, 4)})


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        (lambda c: c.update(peft_type="IA3"), None, "no LoRA"),
        (lambda c: c.update(use_dora=True), None, "use_dora is not served"),
        (lambda c: c.update(bias="all"), None, "bias is not served"),
        (lambda c: c.update(r=0), None, "r is impossible"),
        (lambda c: c.update(rank_pattern=[4]), None, "rank_pattern is impossible"),
        (lambda c: c.update(alpha_pattern={"q_proj": "8"}), None, "alpha_pattern is impossible"),
        (lambda c: c.update(alpha_pattern={"q_proj": 0}), None, "alpha_pattern is impossible"),
        (lambda c: c.update(r=8), None, "rank is not the one that its config states"),
        (None, swap, "do not fit the module"),
        (None, lambda t: t.pop(f"{KEY}.lora_B.weight"), "one of two tensors"),
        (lambda c: c["target_modules"].append("norm"), pair_at("model.norm"), "no linear one"),
        (lambda c: c["target_modules"].append("nobody"), pair_at("nobody"), "no linear one"),
        (None, pair_at("model.norm"), "module that its config does not target"),
        (lambda c: c.update(layers_to_transform=[0, 1]), None, "module that its config does not target"),
        (
            lambda c: c["target_modules"].append("mlp"),
            None,
            r"no weights for.*\n.*\n  expected: model.layers.0.mlp.lora_A",
        ),
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


# By hand: small modules, and an adapter's files as they are read.


def test_a_linear_module_with_an_adapter_beside_it():
    base, x = torch.nn.Linear(3, 2, dtype=torch.float64).requires_grad_(False), torch.randn(4, 3, dtype=torch.float64)
    a, b = torch.randn(1, 3, dtype=torch.float64), torch.randn(2, 1, dtype=torch.float64)
    module = LoraLinear(base, a, b, 0.25)
    expected = x @ base.weight.T + base.bias + 0.25 * (x @ a.T) @ b.T
    torch.testing.assert_close(module(x), expected)
    assert module.weight is base.weight
    assert module.bias is base.bias
    without = LoraLinear(torch.nn.Linear(3, 2, bias=False), a, b, 0.25)
    assert without.bias is None
    assert not module.lora_a.requires_grad


def small_adapter(folder, tensors=None, **settings):
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3.0, "target_modules": ["b", "c"]} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if tensors is None:
        tensors = {"a.b": (2, 3, 4), "c": (2, 5, 6)}
    save_file(
        {
            f"base_model.model.{path}.lora_{part}.weight": torch.full(shape, float(rank))
            for path, (rank, num_in, num_out) in tensors.items()
            for part, shape in (("A", (rank, num_in)), ("B", (num_out, rank)))
        },
        folder / "adapter_model.safetensors",
    )
    return folder


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({}, (1.5, 1.5)),
        ({"use_rslora": True}, (3 / 2**0.5, 3 / 2**0.5)),
        ({"alpha_pattern": {"b": 10}}, (5.0, 1.5)),
        ({"alpha_pattern": {"a.b": 10, "b": 20}}, (5.0, 1.5)),
        ({"alpha_pattern": {"c": 1, "xa.b": 9}}, (1.5, 0.5)),
        ({"alpha_pattern": {".b": 9}}, (1.5, 1.5)),
        ({"alpha_pattern": {r"[ac].*": 8}}, (4.0, 4.0)),
        ({"alpha_pattern": {"^c|b": 8, "c": 2}}, (4.0, 4.0)),
        ({"rank_pattern": {"c": 2}, "r": 2}, (1.5, 1.5)),
        ({"alpha_pattern": None}, (1.5, 1.5)),
        ({"lora_alpha": 0.5}, (0.25, 0.25)),
    ],
)
def test_what_an_adapter_says_of_each_module(tmp_path, settings, scaling):
    updates = read_adapter(small_adapter(tmp_path / "adapter", **settings))
    assert list(updates) == ["a.b", "c"]
    assert [update.scaling for update in updates.values()] == pytest.approx(scaling)
    assert [(*update.a.shape, *update.b.shape) for update in updates.values()] == [(2, 3, 4, 2), (2, 5, 6, 2)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lora_alpha": 0}, "lora_alpha is impossible"), ({"lora_alpha": -1}, "lora_alpha"), ({"r": True}, "r is"),
        ({"r": "4"}, "r is"), ({"r": None}, "r is"), ({"peft_type": None}, "no LoRA"),
        ({"lora_alpha": 10**400}, "lora_alpha is impossible"), ({"r": 10**400}, "r is impossible"), ({"r": 2.0}, "r "),
        ({"rank_pattern": {"c": 3}}, "rank is not the one that its config states.*\n.*\n  expected: 3"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is not served(.*\n)*.*path_initial_model_for_weight_conv"),
        ({"of_tomorrow": 1}, "of_tomorrow is not served.*\n.*\n  expected: null"),
    ],
)  # fmt: skip
def test_what_an_adapter_may_not_say(tmp_path, settings, says):
    with pytest.raises(HarnessError, match=says):
        read_adapter(small_adapter(tmp_path / "adapter", **settings))


@pytest.mark.parametrize("text", ["[]", "3", "{", '"LORA"'])
def test_a_config_that_is_none(tmp_path, text):
    folder = small_adapter(tmp_path / "adapter")
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(HarnessError) as caught:
        read_adapter(folder)
    assert caught.value.code is Code.BAD_LORA


def test_weights_that_cannot_be_read(tmp_path):
    folder = small_adapter(tmp_path / "adapter")
    (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(HarnessError, match="weights cannot be read"):
        read_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(HarnessError, match="weights cannot be read"):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("a", "b", "fits"),
    [
        ((2, 3), (4, 2), True), ((2, 3), (4, 1), False), ((2, 2), (4, 2), False), ((2, 3), (3, 2), False),
        ((2, 4), (3, 2), False), ((2, 3), (5, 2), False), ((2, 3, 1), (4, 2), False), ((2, 3), (4,), False),
    ],
)  # fmt: skip
def test_shapes_that_fit_a_module(a, b, fits):
    base, tensors = torch.nn.Linear(3, 4), (torch.zeros(a), torch.zeros(b))
    if fits:
        _check_shapes(*tensors, base, "path")
        return
    with pytest.raises(HarnessError, match="do not fit the module") as caught:
        _check_shapes(*tensors, base, "path")
    assert (caught.value.where, caught.value.expected) == ("path", "A [rank, 3], B [4, rank]")
    assert caught.value.actual == f"A {list(a)}, B {list(b)}"


def test_other_adapters_are_known_at_the_modules_that_have_one(tmp_path):
    first = write_adapter(tmp_path / "first", seed=1, modules=("q_proj",))
    second = write_adapter(tmp_path / "second", seed=2, modules=("q_proj", "k_proj"), rank=2)
    hf = load_adapted(FOLDER, dtype=torch.float32, lora=first, others=[second])
    layer = hf.model.model.layers[1].self_attn
    assert isinstance(layer.q_proj, LoraLinear)
    assert not isinstance(layer.k_proj, LoraLinear)
    (folder,) = layer.q_proj.others
    assert folder == str(second)
    update = layer.q_proj.others[folder]
    assert torch.equal(update.a, read_adapter(second)["model.layers.1.self_attn.q_proj"].a)
    assert hf.lora_hash == hashlib.sha256(b"".join((first / name).read_bytes() for name in FILES)).hexdigest()
    assert not any(
        isinstance(module, LoraLinear) for module in load_adapted(FOLDER, dtype=torch.float32).model.modules()
    )


@pytest.mark.parametrize(
    "name", ["base_model.model.a.weight", "model.a.lora_A.weight", "base_model.model.a.lora_A.bias"]
)
def test_a_tensor_of_another_name_is_no_part_of_a_lora(tmp_path, name):
    folder = small_adapter(tmp_path / "adapter")
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(weights | {name: torch.zeros(1)}, folder / "adapter_model.safetensors")
    with pytest.raises(HarnessError, match="no part of a LoRA") as caught:
        read_adapter(folder)
    assert caught.value.actual == name
