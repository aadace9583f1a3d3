"""Weights against weights: names, fusions and shards by content, and how much of an update arrived."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from harness.cli.main import run
from harness.errors import HarnessError
from harness.formats.checkpoint import resolve
from harness.judge.weights.compare import compare_weights
from harness.report.document import document as result_document
from harness.report.weights import weights_text
from harness.results.check import Outcome
from reference_engine import EngineConfig, LLMEngine


@pytest.fixture(scope="module")
def tensors():
    return {
        name: tensor for file in resolve("qwen2-tiny").glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def fused(tensors):
    """Return an engine's names: query, key and value fused, gate and up fused, the down projection in two shards."""
    made = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            made[name.replace("q_proj", "qkv_proj")] = torch.cat(
                [tensors[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            )
        elif "gate_proj" in name:
            made[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, tensors[name.replace("gate", "up")]])
        elif "down_proj" in name:
            made |= {f"{name}.{rank}": part for rank, part in enumerate(tensor.chunk(2, dim=1))}
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            made[f"engine.{name}"] = tensor
    return made


@pytest.mark.parametrize("model", ["llama-tiny", "gemma3-tiny", "qwen3-moe-tiny"])
def test_engines_in_memory(model):
    config = EngineConfig(dtype="float32", num_blocks=8)
    with LLMEngine(resolve(model), config) as one, LLMEngine(resolve(model), config) as two:
        assert compare_weights(resolve(model), one).outcome is Outcome.PASS
        assert compare_weights(one, two).outcome is Outcome.PASS
        name = next(name for name, tensor in two.weights().items() if name[:9] == "layers.1." and tensor.dim() == 2)
        two.weights()[name].mul_(1.01)
        result = compare_weights(one, two)
    (odd,) = [item for item in result.tensors if item.num_different]
    assert "layers.1." in odd.name
    assert odd.relative == pytest.approx(0.01, rel=1e-4)


def test_a_vllm_of_two_ranks(tensors):
    class LLM:  # of vLLM, what is used of it
        def apply_model(self, function):
            return [function(rank) for rank in ranks]

    ranks = [nn.Linear(1, 1), nn.Linear(1, 1)]
    for at, rank in enumerate(ranks):
        rank._parameters = {
            name: nn.Parameter(part[at] if "down_proj" in name else tensor, requires_grad=False)
            for name, tensor in tensors.items()
            for part in [tensor.chunk(2, dim=-1)]
        }
    result = compare_weights("qwen2-tiny", LLM())
    assert result.outcome is Outcome.PASS
    assert sorted(item.name for item in result.tensors if "layers.0.mlp.down_proj" in item.name) == [
        "1.model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ]


def test_an_engine_that_has_packed_its_weights_is_refused():
    class LLM:  # vLLM's on a CPU
        def apply_model(self, function):
            return [function(rank)]

    rank = nn.Linear(1, 1)
    rank.weight = nn.Parameter(torch.empty(0))

    with pytest.raises(HarnessError, match="empty ones: weight") as caught:
        compare_weights("qwen2-tiny", LLM())
    assert (caught.value.code, caught.value.where) == ("H013", "the second weights")


def moved(tensors, size=0.01):
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor + size * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
    }


def test_equal_weights_pass(tensors):
    result = compare_weights(tensors, dict(tensors))
    assert result.outcome is Outcome.PASS
    assert len(result.tensors) == len(tensors)


def test_fused_and_sharded_tensors_are_found_by_content(tensors):
    result = compare_weights(tensors, fused(tensors))
    assert result.outcome is Outcome.PASS
    places = {tensor.name: tensor.counterpart for tensor in result.tensors}
    assert places["model.layers.0.self_attn.k_proj.weight"] == (
        "model.layers.0.self_attn.qkv_proj.weight, rows 128 to 191"
    )
    assert places["model.layers.1.self_attn.v_proj.bias"].startswith("model.layers.1.self_attn.qkv_proj.bias, rows ")
    assert places["model.layers.0.mlp.down_proj.weight.1"].startswith("model.layers.0.mlp.down_proj.weight, columns ")
    renamed = sum(tensor.counterpart != tensor.name for tensor in result.tensors)
    assert f"the places of tensors that were found by their values under other names ({renamed})" in weights_text(
        result
    )


def test_a_stale_slice_is_named(tensors):
    old, engine = moved(tensors), fused(tensors)
    stale = "model.layers.1.self_attn.qkv_proj.weight"
    engine[stale] = fused(old)[stale]
    result = compare_weights(tensors, engine, before=old)
    assert result.outcome is Outcome.MISMATCH
    assert {tensor.name for tensor in result.different} == {f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"}
    assert all(tensor.arrived == pytest.approx(0, abs=1e-6) for tensor in result.different)
    assert all(tensor.relative == pytest.approx(0.01, rel=0.1) for tensor in result.different)
    assert 0.5 < result.arrived < 1
    assert compare_weights(tensors, fused(tensors), before=old).arrived == pytest.approx(1)


def test_half_an_update_is_half(tensors):
    old = moved(tensors)
    half = {name: (old[name] + tensor) / 2 for name, tensor in tensors.items()}
    assert compare_weights(tensors, half, before=old).arrived == pytest.approx(0.5, abs=1e-3)


def test_another_dtype_may_round(tensors):
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    assert compare_weights(tensors, rounded).outcome is Outcome.PASS
    result = compare_weights(moved(tensors, 0.1), rounded)
    assert result.outcome is Outcome.MISMATCH


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_another_dtype_rounds_to_nearest(dtype):
    """Numbers below the smallest normal one, too. One that is cut off is up to two such roundings away."""
    weights = {
        "a": torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-8, 0).repeat(512)
    }
    rounded = weights["a"].to(dtype)
    assert compare_weights(weights, {"a": rounded}).outcome is Outcome.PASS
    codes = rounded.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    step = (codes - (rounded.float().abs() > weights["a"].abs()).to(codes.dtype)).view(dtype)
    assert (step.float().abs() <= weights["a"].abs()).all()
    assert compare_weights(weights, {"a": step}).outcome is Outcome.MISMATCH


def test_one_bit_of_the_same_dtype_is_a_difference(tensors):
    name = "model.norm.weight"
    changed = {**tensors, name: tensors[name].clone()}
    changed[name][3] = torch.nextafter(changed[name][3], torch.tensor(torch.inf))
    result = compare_weights(tensors, changed)
    assert [(tensor.name, tensor.num_different) for tensor in result.different] == [(name, 1)]
    assert result.different[0].digests[0] != result.different[0].digests[1]


def test_tensors_without_a_counterpart_are_listed(tensors):
    less = {name: tensor for name, tensor in tensors.items() if "layers.2.mlp.up_proj" not in name}
    result = compare_weights(tensors, less)
    assert result.outcome is Outcome.MISMATCH
    assert result.only_first == ("model.layers.2.mlp.up_proj.weight",)
    assert "1 tensor of the first weights without a counterpart" in weights_text(result)
    engine = fused(tensors)
    engine["model.layers.0.mlp.gate_up_proj.weight"] = torch.cat(
        [engine["model.layers.0.mlp.gate_up_proj.weight"], torch.ones(3, 128)]
    )
    assert compare_weights(tensors, engine).only_second == ("model.layers.0.mlp.gate_up_proj.weight (3 of 387 rows)",)


def test_a_module_is_taken(tensors):
    module = torch.nn.Linear(4, 4)
    assert compare_weights(module, module.state_dict()).outcome is Outcome.PASS
    with pytest.raises(HarnessError, match="these are no weights"):
        compare_weights(module, 3)


def test_the_command(tensors, tmp_path, capsys):
    assert run(["inspect", "llama-tiny", "--against", "llama-tiny"]) == 0
    assert capsys.readouterr().out.startswith("PASS  ")
    assert run(["inspect", "qwen3-tiny", "--against", "llama-tiny"]) == 1
    assert "tensor" in capsys.readouterr().out
    assert run(["inspect", str(tmp_path), "--against", "llama-tiny"]) == 2


def test_json_has_every_tensor(tensors):
    document = result_document(compare_weights(tensors, dict(tensors)))
    assert document["verdict"] == "pass"
    assert len(document["tensors"]) == len(tensors)


def test_nan_on_both_sides_is_a_difference():
    weights = {"a": torch.tensor([1.0, float("nan")])}
    result = compare_weights(weights, {"a": weights["a"].clone()})
    assert (result.outcome, result.tensors[0].num_different) == (Outcome.MISMATCH, 1)


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "modeling_x.py", "model-extra.safetensors", "adapter_config.json"]
)
def test_other_files_that_differ_are_said(tmp_path, name):
    folders = [tmp_path / side for side in "ab"]
    for folder in folders:
        shutil.copytree(resolve("qwen2-tiny"), folder)
    (folders[0] / name).write_text("{}")
    assert f"{name}: not both folders have one" in compare_weights(*folders).not_compared
    (folders[1] / name).write_text('{"a": 1}')
    assert f"{name}: its bytes differ" in compare_weights(*folders).not_compared
    shutil.copy(folders[0] / name, folders[1])
    (folders[0] / "README.md").write_text("")
    index = folders[0] / "model.safetensors.index.json"
    index.write_text(index.read_text() + "\n")
    assert compare_weights(*folders).not_compared == ()


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("config.json", {"rms_norm_eps": 0.01}, "config.json: rms_norm_eps is 1e-06 in the first, 0.01 in the second"),
        ("config.json", {"_name_or_path": "x", "use_cache": False}, None),
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, "tokenizer.json: normalizer"),
        ("tokenizer.json", {"truncation": {"max_length": 9}}, None),
        ("generation_config.json", {"eos_token_id": 77}, "generation_config.json: eos_token_id"),
        ("generation_config.json", {"transformers_version": "4.0"}, None),
    ],
)
def test_other_settings_are_a_difference(tmp_path, file, change, says):
    folder = resolve("qwen2-tiny")
    for source in folder.iterdir():
        (tmp_path / source.name).symlink_to(source)
    (tmp_path / file).unlink()
    (tmp_path / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    result = compare_weights(folder, tmp_path)
    assert result.outcome is (Outcome.PASS if says is None else Outcome.MISMATCH)
    assert (says or "PASS") in weights_text(result)
