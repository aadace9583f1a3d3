"""`harness inspect`: files and checkpoints, for people and for programs."""

import json
import shutil


def test_a_checkpoint(harness, llama):
    ran = harness("inspect", llama)
    assert ran.status == 0
    assert "model.embed_tokens.weight" in ran.out
    assert "the tensors are those that the config asks for" in ran.out


def test_a_sharded_checkpoint_as_json(harness, checkpoints):
    document = harness("inspect", checkpoints / "qwen2-tiny", "--format", "json").json
    assert document["kind"] == "checkpoint"
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [file["file"] for file in document["files"]] == files


def test_a_file(harness, llama):
    document = harness("inspect", llama / "model.safetensors", "--format", "json").json
    assert document["kind"] == "file"
    assert {"name", "dtype", "shape", "begin", "end"} <= set(document["files"][0]["tensors"][0])


def test_what_is_missing_for_the_config(harness, llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    ran = harness("inspect", folder, "--format", "json")
    assert ran.status == 0
    assert "model.layers.3.mlp.up_proj.weight" in ran.json["against_config"]["missing"]
