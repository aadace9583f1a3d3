"""`inspect_path`: tables of files and checkpoints, and what a checkpoint lacks for its config."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, MixtralConfig, Qwen3Config, Qwen3ForCausalLM

from harness.errors import Code, HarnessError
from harness.formats.inspect import inspect_path, render_text
from harness.formats.values import open_source

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path):
    path = tmp_path / "llama"
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(path)
    return path


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def refused(path):
    with pytest.raises(HarnessError) as caught:
        inspect_path(path)
    return caught.value.code, str(caught.value)


def test_a_file(tmp_path):
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4).half()}, tmp_path / "x.safetensors", metadata={"k": "v"})
    info = inspect_path(tmp_path / "x.safetensors")
    (file,) = info["files"]
    assert info["kind"] == "file"
    assert file["metadata"] == {"k": "v"}
    assert file["data_offset"] == file["header_bytes"] + 8
    assert file["tensors"][0] == {
        "name": "a", "dtype": "F32", "shape": [2, 3], "begin": 0, "end": 24, "num_bytes": 24,
    }  # fmt: skip
    assert info["totals"] == {
        "num_tensors": 2,
        "num_parameters": 10,
        "num_bytes": 32,
        "by_dtype": {
            "F16": {"num_tensors": 1, "num_parameters": 4, "num_bytes": 8},
            "F32": {"num_tensors": 1, "num_parameters": 6, "num_bytes": 24},
        },
    }
    assert json.loads(json.dumps(info)) == info


def test_a_checkpoint_with_a_tied_head(llama):
    info = inspect_path(llama)
    assert info["kind"] == "checkpoint"
    assert info["config"]["model_type"] == "llama"
    tied = {"compared": True, "missing": [], "unexpected": [], "misshapen": [], "tied": ["lm_head.weight"]}
    assert info["against_config"] == tied
    assert info["totals"]["num_tensors"] == 20
    assert json.loads(json.dumps(info)) == info


def test_an_untied_checkpoint_in_shards(tmp_path):
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)).save_pretrained(tmp_path, max_shard_size="5KB")
    info = inspect_path(tmp_path)
    assert len(info["files"]) > 1
    assert info["against_config"] == {"compared": True, "missing": [], "unexpected": [], "misshapen": [], "tied": []}


def test_missing_unexpected_and_misshapen_tensors(llama):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
        tensors["model.extra"] = torch.zeros(1)
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(16, 16)

    rewrite(llama, change)
    info = inspect_path(llama)
    assert info["against_config"] == {
        "compared": True,
        "missing": ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"],
        "unexpected": ["model.extra"],
        "misshapen": [
            {"name": "model.layers.1.self_attn.k_proj.weight", "expected": [8, 16], "actual": [16, 16]},
        ],
        "tied": ["lm_head.weight"],
    }
    text = render_text(info)
    assert "missing" in text
    assert "expected [8, 16], actual [16, 16]" in text


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"model_type": "flying_carpet"}, Code.UNSUPPORTED_ARCHITECTURE, "flying_carpet"),
        ({"model_type": None}, Code.UNSUPPORTED_ARCHITECTURE, "does not know this model_type"),
        ({"model_type": "clip"}, Code.UNSUPPORTED_ARCHITECTURE, "no causal language model"),
        ({"num_hidden_layers": 10**9}, Code.BAD_CONFIG, "exceeds 4096"),
        ({"hidden_size": "large"}, Code.BAD_CONFIG, "cannot build"),
        ({"hidden_size": -16}, Code.BAD_CONFIG, "cannot build"),
        ({"rope_parameters": {"rope_type": "spiral"}}, Code.BAD_CONFIG, "cannot build"),
    ],
)
def test_a_config_that_cannot_be_built(llama, change, code, message):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | change))
    actual_code, text = refused(llama)
    assert actual_code is code, text
    assert message in text


def test_models_that_are_not_compared(tmp_path):
    MixtralConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    info = inspect_path(tmp_path)
    assert info["against_config"]["compared"] is False
    assert "not compared with the config: transformers renames" in render_text(info)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    assert "packed" in inspect_path(tmp_path)["against_config"]["reason"]


def test_another_architecture(tmp_path):
    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    save_file({"transformer.wpe.weight": torch.zeros(1024, 768)}, tmp_path / "model.safetensors")
    comparison = inspect_path(tmp_path)["against_config"]
    assert "transformer.h.0.attn.c_attn.weight" in comparison["missing"]
    assert "transformer.wpe.weight" not in comparison["missing"]


def test_damaged_input(llama, tmp_path):
    assert refused(tmp_path / "nothing")[0] is Code.NOT_A_CHECKPOINT
    assert refused(tmp_path)[0] is Code.NOT_A_CHECKPOINT
    content = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(content[:-1])
    code, message = refused(llama)
    assert code is Code.DAMAGED_SAFETENSORS
    assert "the file is truncated" in message


def test_numbers_are_not_reformatted(tmp_path):
    save_file({"1e5": torch.zeros(1)}, tmp_path / "x.safetensors")
    text = render_text(inspect_path(tmp_path / "x.safetensors"))
    assert "1e5" in text
    assert text.startswith(f"file {tmp_path / 'x.safetensors'}\n\nx.safetensors: ")


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda path: path.unlink(), Code.MISSING_SHARD),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), Code.DAMAGED_SAFETENSORS),
        (lambda path: save_file({"other": torch.ones(2)}, path), Code.DAMAGED_SAFETENSORS),
    ],
)
def test_a_file_that_changes_after_it_was_opened_is_bad_input(tmp_path, spoil, code):
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.ones(64, 64)}, path)
    source = open_source(path)
    spoil(path)
    with pytest.raises(HarnessError) as caught:
        source.tensor("a")
    assert caught.value.code is code
