"""`harness inspect`: files and checkpoints, for people and for programs."""

import json
import shutil

import pytest
import torch

from .commands import ENGINE

OTHER_EPS = ENGINE.replace(
    "    def run(",
    """    def resolved_settings(self):
        from harness.engines import ModelSettings

        return ModelSettings(norm_eps=(1e-6,), num_layers=(3,))

    def run(""",
)


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


def test_a_recording_a_golden_and_a_dump(harness, golden, recording, tmp_path):
    shown = harness("inspect", recording, "--format", "json").json
    assert shown["kind"] == "recording"
    assert [request["id"] for request in shown["requests"]] == [0, 1]
    phases = {step["phase"]: step["num_rows"] for step in shown["steps"]}
    computed = sum(rows for phase, rows in phases.items() if phase != "readback")
    taps = {tap["name"]: tap for tap in shown["taps"]}
    assert taps["model.embed_tokens"]["num_rows"] == computed
    assert 0 < taps["lm_head"]["num_rows"] < computed
    assert "model.layers.0.k_cache" in harness("inspect", recording).out
    assert harness("inspect", golden, "--format", "json").json["kind"] == "golden"

    torch.save({"hidden": torch.zeros(3, 4)}, tmp_path / "dump.pt")
    (tmp_path / "notes.txt").write_text("none")
    shown = harness("inspect", tmp_path, "--format", "json").json
    assert shown["tensors"] == [{"name": "dump.pt: hidden", "dtype": "float32", "shape": [3, 4]}]
    assert shown["left_out"] == ["notes.txt: no file of tensors"]
    assert "left out: notes.txt" in harness("inspect", tmp_path).out


def test_an_embedded_checkpoint_by_its_name(harness):
    assert harness("inspect", "qwen3-tiny", "--format", "json").json["kind"] == "checkpoint"


@pytest.mark.slow
def test_traces_and_snapshots_are_summed_up(harness, tmp_path):
    out = tmp_path / "out"
    assert harness("profile", "--prompt-tokens", 4, "--max-new-tokens", 2, "--runs", 1, "--out", out).status == 0
    for command, file in (("trace", next(out.rglob("*.json.gz"), None)), ("memory", next(out.rglob("*.pickle"), None))):
        assert file is not None
        ran = harness("inspect", file)
        assert (ran.status, ran.out) == (0, harness(command, "summary", file).out)


def test_a_folder_of_nothing_is_no_checkpoint(harness, tmp_path):
    ran = harness("inspect", tmp_path)
    assert (ran.status, ran.err.partition(":")[0]) == (2, "H001")


def test_what_is_missing_for_the_config(harness, llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    ran = harness("inspect", folder, "--format", "json")
    assert ran.status == 1
    assert "model.layers.3.mlp.up_proj.weight" in ran.json["against_config"]["missing"]


def test_the_settings_of_an_engine(harness, llama):
    ran = harness("inspect", "--engine", "reference", "--model", llama)
    assert ran.status == 0
    assert ran.out.splitlines()[0].split() == ["setting", "reference", "HF"]
    assert ["norm_eps", "1e-05", "1e-05"] in [line.split() for line in ran.out.splitlines()]
    assert ran.out.endswith("\n11 settings compared, 0 differ; -: not shown\n")


def test_a_setting_that_differs(harness, install, llama):
    ran = harness("inspect", "--engine", install(OTHER_EPS), "--model", llama)
    assert ran.status == 1
    assert ["norm_eps", "1e-06", "1e-05", "differs"] in [line.split() for line in ran.out.splitlines()]
    assert "\nH054: the engine has norm eps 1e-06, HF has 1e-05\n2 settings compared, 1 differ; -: not shown" in ran.out


@pytest.mark.slow
def test_a_setting_that_differs_as_json(harness, install, llama):
    ran = harness("inspect", "--engine", install(OTHER_EPS), "--model", llama, "--format", "json")
    assert ran.status == 1
    document = ran.json
    settings = {item.pop("setting"): item for item in document.pop("settings")}
    assert document == {
        "schema_version": 1,
        "kind": "settings",
        "engine": "foreign",
        "model": str(llama),
        "findings": [{"code": "H054", "message": "the engine has norm eps 1e-06, HF has 1e-05"}],
    }
    assert settings["norm_eps"] == {"engine": [1e-6], "hf": [1e-5], "differs": True}
    assert settings["num_layers"] == {"engine": [3], "hf": [3], "differs": False}
    assert settings["head_dim"] == {"engine": None, "hf": [32], "differs": None}


@pytest.mark.slow
def test_an_engine_that_shows_no_settings(harness, install, llama):
    ran = harness("inspect", "--engine", install(ENGINE), "--model", llama)
    assert ran.status == 5
    assert ran.out.endswith("\n0 settings compared, 0 differ; -: not shown\n")


@pytest.mark.parametrize("arguments", [[], [".", "--engine", "hf"], ["--model", "llama-tiny"]])
def test_one_thing_is_inspected(harness, arguments):
    ran = harness("inspect", *arguments)
    assert ran.status == 2
    assert ran.err.startswith("H013: one thing is inspected: a path, or an engine\n")


@pytest.mark.slow
def test_a_check_says_which_setting_differs_and_judges_the_rows_as_well(harness, install, llama, workload):
    ran = harness("check", "--engine", install(OTHER_EPS), "--model", llama, *workload, "--format", "json")
    assert ran.status == 1
    assert [(finding["code"], finding["message"], finding["schedule"]) for finding in ran.json["findings"]] == [
        ("H054", "the engine has norm eps 1e-06, HF has 1e-05", schedule) for schedule in ("plain", "batched")
    ]
    assert ran.json["first_divergence"] is None
    assert ran.json["next"] == {
        "tap": None,
        "cause": "the engine has norm eps 1e-06, HF has 1e-05",
        "command": f"harness inspect --engine foreign --model {llama} --dtype float32",
        "file": None,
        "line": None,
    }
    assert {tap["verdict"] for tap in ran.json["taps"]} <= {"exact", "noise", "convention"}
    ran = harness("check", "--engine", "foreign", "--model", llama, *workload)
    assert ran.status == 1
    assert "H054  the engine has norm eps 1e-06, HF has 1e-05\n" in ran.out
