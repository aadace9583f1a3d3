"""What a config asks for is kept in the cache: a second comparison imports no transformers, and says the same."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

from harness.base.files import json_digest
from harness.formats.checkpoint import against_config as module
from harness.formats.inspect import inspect_path

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Return the folder of the cache, in a process that has not imported transformers before."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_transformers_is_imported", lambda: False)
    return tmp_path / "cache" / "expected-tensors"


@pytest.fixture
def checkpoint(tmp_path):
    """Return a tied checkpoint with a tensor that is missing, one too many, and one of another shape."""
    path = tmp_path / "llama"
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.extra"] = torch.zeros(1)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(16, 16)
    save_file(tensors, path / "model.safetensors")
    return path


EXPECTED = {
    "compared": True,
    "missing": ["model.norm.weight"],
    "unexpected": ["model.extra"],
    "misshapen": [{"name": "model.layers.0.self_attn.k_proj.weight", "expected": [8, 16], "actual": [16, 16]}],
    "tied": ["lm_head.weight"],
}


def compared(path):
    return inspect_path(path)["against_config"]


def build_nothing(monkeypatch):
    def refuse(*_args):
        raise AssertionError("HF's module was built")

    monkeypatch.setattr(module, "meta_model", refuse)


def test_the_second_comparison_builds_nothing_and_says_the_same(checkpoint, monkeypatch):
    assert compared(checkpoint) == EXPECTED
    build_nothing(monkeypatch)
    assert compared(checkpoint) == EXPECTED


def test_a_second_inspection_imports_neither_transformers_nor_torch(checkpoint):
    compared(checkpoint)
    code = (
        "import sys; from harness.formats.inspect import inspect_path; info = inspect_path(sys.argv[1]); import json; "
    )
    code += "print(json.dumps([info['against_config'], sorted({'torch', 'transformers'} & sys.modules.keys())]))"
    ran = subprocess.run([sys.executable, "-c", code, checkpoint], capture_output=True, env=os.environ, check=True)
    assert json.loads(ran.stdout) == [EXPECTED, []]


def test_a_reason_not_to_compare_is_kept_too(tmp_path, monkeypatch):
    MixtralConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    first = compared(tmp_path)
    build_nothing(monkeypatch)
    assert compared(tmp_path) == first
    assert first["compared"] is False


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: text[: len(text) // 2], id="truncated"),
        pytest.param(lambda text: "", id="empty"),
        pytest.param(lambda text: text.replace("k_proj", "x_proj"), id="another name"),
        pytest.param(lambda text: text.replace("[8, 16]", "[16, 16]"), id="another shape"),
        pytest.param(lambda text: "[1]", id="no table"),
        pytest.param(lambda text: '{"digest": 1}', id="no tensors"),
        pytest.param(
            lambda text: json.dumps({"digest": json_digest({}), "tensors": {}}), id="neither shapes nor reason"
        ),
    ],
)
def test_a_damaged_file_of_the_cache_is_made_again(checkpoint, kept, damage):
    compared(checkpoint)
    (file,) = kept.iterdir()
    content = file.read_text()
    file.write_text(damage(content))
    assert file.read_text() != content
    assert compared(checkpoint) == EXPECTED
    assert file.read_text() == content


@pytest.mark.parametrize(
    ("versions", "num_files"),
    [
        pytest.param({"torch": "99.0"}, 2, id="another torch"),
        pytest.param({"transformers": "99.0"}, 2, id="another transformers"),
        pytest.param({"transformers": "99.0.dev0"}, 1, id="transformers from a repository is not kept"),
    ],
)
def test_another_version_is_asked_again(checkpoint, kept, monkeypatch, versions, num_files):
    compared(checkpoint)
    known = module.version
    monkeypatch.setattr(module, "version", lambda package: versions.get(package) or known(package))
    compared(checkpoint)
    assert len(list(kept.iterdir())) == num_files


def test_another_config_is_asked_again(checkpoint):
    compared(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    assert compared(checkpoint)["misshapen"] == [
        {"name": "model.layers.0.self_attn.v_proj.weight", "expected": [16, 16], "actual": [8, 16]}
    ]


def test_a_process_that_may_have_patched_transformers_keeps_nothing(checkpoint, kept, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("HARNESS_CACHE", str(kept.parent))
    assert compared(checkpoint) == EXPECTED
    assert not kept.exists()


def test_a_cache_that_cannot_be_written_costs_time_alone(checkpoint, kept):
    kept.parent.write_text("a file")
    assert compared(checkpoint) == EXPECTED
