"""Weights that are read while they are needed: the same numbers, and nothing in memory before or after."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import core_model_loading

from harness.errors import Code, HarnessError
from harness.oracle import model
from harness.oracle.decode import greedy_continuation
from harness.oracle.model import load_model
from harness.oracle.untraced import parts_kept
from harness.oracle.weights import ResidentWeights, parameters_on_meta

from ..tiny_models import save, tiny_model
from .state import bits, surroundings
from .test_paired import Notes, pair

FAMILIES = (
    "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "mamba", "mixtral", "phi3", "qwen3_moe",
    "llama4_text",
)  # fmt: skip
TOKENS = list(range(3, 20))


class BoomError(Exception):
    """Raised by the tests."""


def on_meta(hf):
    """Names of parameters without numbers; the embedding's stands for one number, and has a device."""
    named = hf.model.named_parameters(remove_duplicate=False)
    return {name for name, x in named if x.is_meta or (x.numel() > 1 and not any(x.stride()))}


def parameters(hf):
    return {name for name, _ in hf.model.named_parameters(remove_duplicate=False)}


def assert_same_numbers(streamed, resident):
    assert on_meta(streamed) == parameters(streamed) == parameters(resident)
    vars(streamed)["graph"] = resident.graph  # see test_the_graph_is_traced_from_streamed_weights
    values = [pair(hf, TOKENS).values for hf in (streamed, resident)]
    for side in ("control", "truth"):
        here, there = (value[side] for value in values)
        assert here.keys() == there.keys()
        assert [tap for tap in here if not torch.equal(here[tap], there[tap])] == []
    assert greedy_continuation(streamed, TOKENS, 3) == greedy_continuation(resident, TOKENS, 3)
    assert on_meta(streamed) == parameters(streamed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_streamed_weights_give_the_numbers_of_resident_ones(load, streamed, checkpoints, name, dtype):
    assert_same_numbers(streamed(checkpoints / name, dtype), load(name, dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_weights_of_other_families(tiny, tiny_folder, streamed, family):
    assert_same_numbers(streamed(tiny_folder(family)), tiny(family))


def test_the_graph_is_traced_from_streamed_weights(load, streamed, checkpoints):
    for _ in range(6):
        graph = streamed(checkpoints / "llama-tiny").graph
        assert list(graph) == list(load("llama-tiny").graph)
        assert graph.aliases == load("llama-tiny").graph.aliases


def test_experts_are_merged_on_loading(tiny_folder):
    """Else the test above would say nothing of it."""
    with safe_open(tiny_folder("mixtral") / "model.safetensors", framework="pt") as file:
        keys = [key for key in file.keys() if "layers.0" in key and "experts" in key]  # noqa: SIM118
    assert len(keys) == 4 * 3, "one for each expert and product"


def test_a_checkpoint_in_shards(tmp_path, streamed):
    folder = save(tiny_model("qwen3_moe"), tmp_path / "shards", max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    assert_same_numbers(streamed(folder), load_model(folder, dtype=torch.float32))


def test_weights_in_another_dtype_than_the_engines(tmp_path, streamed):
    folder = save(tiny_model("llama").to(torch.float16), tmp_path / "half")
    for dtype in (torch.bfloat16, torch.float32):
        assert_same_numbers(streamed(folder, dtype), load_model(folder, dtype=dtype))


def test_a_part_is_in_memory_while_it_is_held_and_no_longer(checkpoints, streamed):
    hf = streamed(checkpoints / "llama-tiny", torch.bfloat16)
    for part in hf.parts:
        with hf.weights.held(part):
            names = {name for name in parameters(hf) if name.startswith(f"{part}.")}
            tied = {"lm_head.weight", "model.embed_tokens.weight"}
            assert names <= parameters(hf) - on_meta(hf) <= (names | tied if names & tied else names)
            assert {x.dtype for x in hf.module(part).parameters()} <= {torch.bfloat16}
        assert on_meta(hf) == parameters(hf)


def test_a_tied_head_is_the_embedding(checkpoints, streamed):
    hf = streamed(checkpoints / "qwen3-tiny")
    table = load_file(checkpoints / "qwen3-tiny" / "model.safetensors")["model.embed_tokens.weight"].float()
    for part in ("model.embed_tokens", "lm_head"):
        with hf.weights.held(part):
            assert torch.equal(hf.module(part).weight, table)
        assert on_meta(hf) == parameters(hf)


def test_a_part_that_is_held_twice_is_read_once(checkpoints, streamed):
    hf = streamed(checkpoints / "llama-tiny")
    with hf.weights.held("model.layers.1"):
        weight = hf.module("model.layers.1.mlp.up_proj").weight
        with hf.weights.held("model.layers.1"):
            assert hf.module("model.layers.1.mlp.up_proj").weight is weight
        assert not weight.is_meta
        assert hf.module("model.layers.1.mlp.up_proj").weight is weight


@pytest.mark.parametrize(("num_free", "num_reads"), [(1 << 40, 1), (0, 5)])
def test_parts_are_read_once_for_many_tokens_where_memory_is_free(
    checkpoints, streamed, monkeypatch, num_free, num_reads
):
    hf, read = streamed(checkpoints / "llama-tiny"), []
    load = hf.weights._load
    monkeypatch.setattr(hf.weights, "_load", lambda names: read.append(names[0]) or load(names))
    monkeypatch.setattr("harness.oracle.untraced.available_bytes", lambda: num_free)
    with parts_kept(hf):
        kept = [greedy_continuation(hf, TOKENS, 2), greedy_continuation(hf, TOKENS, 3)]
    assert read.count("model.layers.1.self_attn.q_proj.weight") == num_reads
    assert on_meta(hf) == parameters(hf)
    assert kept[1][:2] == kept[0]


def test_a_part_is_dropped_under_an_exception(checkpoints, streamed):
    hf = streamed(checkpoints / "qwen3-tiny")
    with pytest.raises(BoomError), hf.weights.held("lm_head"):
        raise BoomError
    assert on_meta(hf) == parameters(hf)


@pytest.mark.parametrize("side", ["control", "truth"])
def test_nothing_is_left_in_memory_when_the_observer_raises(checkpoints, streamed, side):
    hf = streamed(checkpoints / "qwen3-tiny", torch.bfloat16)
    assert hf.graph
    before = surroundings(hf)

    def explode(value):
        if value.operation.tap == "model.layers.1.mlp.act":
            raise BoomError

    with pytest.raises(BoomError):
        pair(hf, TOKENS, observer=Notes(**{side: explode}))
    assert surroundings(hf) == before
    assert on_meta(hf) == parameters(hf)


def test_no_more_than_one_part_is_in_memory_while_the_model_runs(checkpoints, streamed):
    hf, held, tied = streamed(checkpoints / "llama-tiny"), [], {"lm_head.weight", "model.embed_tokens.weight"}

    def look(value):
        there = parameters(hf) - on_meta(hf) - tied
        assert all(name.startswith(f"{hf.part_of(value.operation.module)}.") for name in there)
        held.append(len(there))

    pair(hf, TOKENS, observer=Notes(control=look, truth=look))
    assert max(held) == len(list(hf.module("model.layers.0").parameters()))


def test_buffers_are_computed(checkpoints, streamed, load):
    """Frequencies are in no checkpoint."""
    hf = streamed(checkpoints / "llama-tiny")
    assert torch.equal(hf.module("model.rotary_emb").inv_freq, load("llama-tiny").module("model.rotary_emb").inv_freq)


def changed(folder, copy, part, change):
    """Copy a checkpoint and change its first tensor with `part` in its name; return the copy and the tensor's name."""
    folder = shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if part in name)
    tensor = change(tensors.pop(name))
    if tensor is not None:
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder, name


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("mixtral", "layernorm"),
        ("mixtral", "embed_tokens"),
        ("gpt_neox", "embed_in"),
        ("gpt_neox", "layernorm.bias"),
        ("mixtral", "experts.2.w2"),
    ],
)
def test_a_tensor_that_is_missing_is_an_error(tmp_path, streamed, tiny, tiny_folder, family, part):
    folder, name = changed(tiny_folder(family), tmp_path / "copy", part, lambda _: None)
    with pytest.raises(HarnessError):
        load_model(folder, dtype=torch.float32)
    with pytest.raises(HarnessError) as caught:
        run_streamed(streamed, folder, tiny(family).graph)
    assert caught.value.code is Code.TENSORS_CONTRADICT_CONFIG
    merged = "mlp.experts.down_proj"  # of an expert that is lacking among many only the number is seen
    assert (merged if part == "experts.2.w2" else name) in str(caught.value)


@pytest.mark.parametrize("part", ["self_attn.o_proj", "experts.2.w2"])
def test_a_tensor_of_another_shape_is_an_error(tmp_path, streamed, tiny, tiny_folder, part):
    folder, _ = changed(tiny_folder("mixtral"), tmp_path / "copy", part, lambda tensor: tensor[:, :-1])
    with pytest.raises(HarnessError):
        load_model(folder, dtype=torch.float32)
    with pytest.raises(HarnessError) as caught:
        run_streamed(streamed, folder, tiny("mixtral").graph)
    assert caught.value.code is Code.TENSORS_CONTRADICT_CONFIG


def run_streamed(streamed, folder, graph):
    """Run a model whose graph cannot be traced: what is wrong may be seen on loading or as late as here."""
    hf = streamed(folder)
    vars(hf)["graph"] = graph
    pair(hf, TOKENS)


def test_small_checkpoints_are_held(load):
    hf = load("qwen3-tiny")
    before = bits(hf.model)
    assert isinstance(hf.weights, ResidentWeights)
    with hf.weights.held("model.layers.1"):
        assert bits(hf.model) == before
    assert bits(hf.model) == before


def test_a_model_that_is_run_often_is_held_however_large(checkpoints, monkeypatch):
    monkeypatch.setattr(model, "_RESIDENT_BYTES", 0)
    hf = load_model(checkpoints / "llama-tiny", dtype=torch.float32, stays=True)
    assert isinstance(hf.weights, ResidentWeights)
    assert not on_meta(hf)


@pytest.mark.parametrize("fails", [False, True])
def test_modules_are_built_without_memory_in_the_block_only(fails):
    register = torch.nn.Module.register_parameter
    try:
        with parameters_on_meta():
            module = torch.nn.BatchNorm1d(4)
            assert all(x.is_meta for x in module.parameters())
            assert module.running_mean.tolist() == [0, 0, 0, 0], "buffers are computed"
            if fails:
                raise BoomError
    except BoomError:
        pass
    assert torch.nn.Module.register_parameter is register
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_a_config_that_transformers_does_not_know(tmp_path, streamed, tiny_folder):
    folder = shutil.copytree(tiny_folder("gpt_neox"), tmp_path / "copy")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "no_such_model"}))
    with pytest.raises(HarnessError) as caught:
        streamed(folder)
    assert caught.value.code is Code.UNSUPPORTED_ARCHITECTURE


def test_no_code_of_a_checkpoint_is_run(checkpoints, tmp_path, monkeypatch):
    """What loads a checkpoint through HF's own loader does not follow its `auto_map`."""
    folder, mark = tmp_path / "llama-tiny", tmp_path / "was run"
    shutil.copytree(checkpoints / "llama-tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}))
    (folder / "mine.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaForCausalLM\n"
        f"Path({str(mark)!r}).touch()\n"
        "class Mine(LlamaForCausalLM): pass\n"
    )
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert type(model._from_pretrained(folder, torch.float32)).__name__ == "LlamaForCausalLM"
    assert not mark.exists()


FIRST, SECOND = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))


def renaming(monkeypatch, names):
    """Let transformers rename some tensors of the checkpoint."""
    rename = core_model_loading.rename_source_key

    def renamed(key, *arguments):
        return (names[key], None) if key in names else rename(key, *arguments)

    monkeypatch.setattr(core_model_loading, "rename_source_key", renamed)


def test_a_tensor_is_that_of_the_parameter_that_it_is_renamed_to(monkeypatch, streamed, checkpoints):
    renaming(monkeypatch, {FIRST: SECOND, SECOND: FIRST})
    keys = streamed(checkpoints / "llama-tiny", torch.float32).weights._keys_of
    assert (keys[FIRST], keys[SECOND]) == ([SECOND], [FIRST])


def test_a_tensor_that_is_renamed_to_nothing_keeps_its_name_where_that_is_a_parameters(
    monkeypatch, streamed, checkpoints
):
    renaming(monkeypatch, {FIRST: "nobody"})
    keys = streamed(checkpoints / "llama-tiny", torch.float32).weights._keys_of
    assert keys[FIRST] == [FIRST]
    assert "nobody" not in keys


def test_no_parameter_asks_for_a_gradient(streamed, checkpoints):
    hf = streamed(checkpoints / "qwen3-tiny", torch.float32)
    assert not any(parameter.requires_grad for parameter in hf.model.parameters())
    for part in hf.parts:
        with hf.weights.held(part):
            assert not any(parameter.requires_grad for parameter in hf.module(part).parameters())
    assert not any(parameter.requires_grad for parameter in hf.model.parameters())
