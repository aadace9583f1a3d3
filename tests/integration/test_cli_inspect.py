"""`harness inspect`: files and checkpoints, for people and for programs."""

import json
import shutil
import sqlite3
from contextlib import closing

import pytest
import torch

from .commands import ENGINE, rewrite

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


def test_the_tokens_and_operations_of_a_golden(harness, golden, recording):
    shown = harness("inspect", golden, "--format", "json").json
    tokens = {(token["request"], token["position"]): token for token in shown["tokens"]}
    assert [tokens[0, at]["id"] for at in range(6)] == [1, 4, 5, 6, 7, 8]
    assert tokens[0, 0]["piece"] == "<bos>"
    assert "likeliest" not in tokens[0, 4]  # the head is computed from the prompt's end on
    best = [item["log_prob"] for item in tokens[0, 5]["likeliest"]]
    assert best == sorted(best, reverse=True)
    assert tokens[0, 5]["log_prob"] == best[0]  # greedy
    assert tokens[0, 5]["likeliest"][0]["id"] == tokens[0, 6]["id"]
    taps = {tap["name"]: tap for tap in shown["taps"]}
    assert taps["model.layers.0.attention"]["kind"] == "attention"
    assert taps["lm_head"]["inputs"] == ["model.norm"]
    assert harness("inspect", recording, "--format", "json").json["tokens"][5]["piece"] == tokens[0, 5]["piece"]
    text = harness("inspect", golden).out
    assert f"{tokens[0, 6]['piece']!r} {best[0]:.3g}, " in text
    assert "q_rope, k_rope, self_attn.v_proj" in text


def test_tokens_of_a_checkpoint_that_is_gone_have_no_pieces(harness, golden, tmp_path):
    folder = shutil.copytree(golden, tmp_path / "golden")
    for name in ("golden.json", "noise.safetensors"):  # what is left is a recording
        (folder / name).unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["model"]["id"] = str(tmp_path / "gone")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shown = harness("inspect", folder, "--format", "json").json
    assert {token["piece"] for token in shown["tokens"]} == {None}
    rewrite(folder, lambda tensors: tensors.update(lm_head=tensors["lm_head"][:, 0].contiguous()))
    ran = harness("inspect", folder, "--format", "json")
    assert ran.status == 0, ran.out
    assert "likeliest" not in ran.json["tokens"][5]
    assert "kind" not in shown["taps"][0]


@pytest.mark.parametrize(
    ("name", "folded", "place", "note"),
    [
        ("qwen3-tiny", "0 to 2", "tied to model.embed_tokens.weight", None),
        ("qwen2-tiny", None, "model-00002-of-00002.safetensors", None),
        ("qwen3-next-tiny", None, "tied to model.embed_tokens.weight", "transformers renames or merges"),
    ],
)
def test_the_modules_of_a_checkpoint(harness, checkpoints, name, folded, place, note):
    from transformers import AutoModelForCausalLM

    ran = harness("inspect", name, "--modules", "--format", "json")
    assert ran.status == 0
    modules = {module["path"]: module for module in ran.json["modules"]}
    model = AutoModelForCausalLM.from_pretrained(checkpoints / name)
    assert {path: module["class"] for path, module in modules.items()} == {
        path: type(module).__name__ for path, module in model.named_modules()
    }
    shapes = {
        f"{path}.{item['name']}": item["shape"] for path, module in modules.items() for item in module["parameters"]
    }
    assert shapes == {path: list(x.shape) for path, x in model.named_parameters(remove_duplicate=False)}
    assert note is None or ran.json["note"].startswith(note)
    lines = harness("inspect", name, "--modules").out.splitlines()
    assert next(line for line in lines if line.startswith("  lm_head")).endswith(place)
    assert any(line.startswith(f"      {folded}") for line in lines) == (folded is not None)


def test_the_modules_are_those_of_a_checkpoint(harness, golden):
    ran = harness("inspect", "--modules")
    assert (ran.status, ran.err[:4]) == (2, "H013")
    ran = harness("inspect", golden, "--modules")
    assert (ran.status, ran.err[:4]) == (2, "H001")


def test_an_embedded_checkpoint_by_its_name(harness):
    assert harness("inspect", "qwen3-tiny", "--format", "json").json["kind"] == "checkpoint"


@pytest.mark.slow
def test_traces_and_snapshots_are_summed_up(harness, tmp_path):
    out = tmp_path / "out"
    assert harness("profile", "--prompt-tokens", 4, "--max-new-tokens", 2, "--runs", 1, "--out", out).status == 0
    for command, ending in (("summary", "*.json.gz"), ("memory", "*.pickle")):
        file = next(out.rglob(ending))
        ran = harness("inspect", file)
        assert (ran.status, ran.out) == (0, harness("trace", command, file).out)


def test_a_report_of_nsight_systems_is_summed_up(harness, tmp_path):
    with closing(sqlite3.connect(tmp_path / "report.sqlite")) as database, database:
        database.execute("CREATE TABLE StringIds (id, value)")
        database.execute("CREATE TABLE NVTX_EVENTS (start, end, globalTid, text, textId)")
        database.execute("INSERT INTO NVTX_EVENTS VALUES (0, 2000, 1, 'execute_context_0(0)_generation_4(4)', NULL)")
    ran = harness("inspect", tmp_path / "report.sqlite")
    assert ran.status == 0
    assert ran.out.splitlines()[-1].split() == ["decode", "4", "requests", "1", "2"]
    assert "4 requests" in ran.out


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
