"""`harness suite`: what is wrong is said before the first task; a suite with a broken engine, a crash and a resume."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch

from ...integration.commands import ENGINE, listen_to_ctrl_c

CASE = """
schema_version = 1
model = "{model}"
dtype = "float32"
max_new_tokens = 2
schedules = ["plain"]
[[requests]]
token_ids = [1, 4, 5, 6]
"""
MATRIX = """
engine = ["reference", "foreign", "crashing"]
[[rules]]
time_limit_s = 300
"""
RUN = "self.inner.run(workload, Between(writer))"
WRONG = ENGINE.replace(
    "    def __init__(self, writer):",
    """    def tap(self, name, rows, **more):
        self.writer.tap(name, rows * 1.5 if name == "model.layers.1.mlp.down_proj" else rows, **more)

    def __init__(self, writer):""",
)
CRASHES = ENGINE.replace(RUN, "import os; os.abort()")


@pytest.fixture
def case(tmp_path: Path, llama: Path) -> Path:
    path = tmp_path / "llama.toml"
    path.write_text(CASE.format(model=llama))
    return path


def matrix(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "matrix.toml"
    path.write_text(text)
    return path


def test_a_matrix_that_names_an_engine_that_is_not_there(harness, case, tmp_path):
    ran = harness("suite", case, "--matrix", matrix(tmp_path, 'engine = ["reference", "vlm"]'))
    assert ran.status == 2
    assert ran.err.startswith("H014: no engine is called 'vlm'\n  where:    llama[vlm]\n")


def test_a_matrix_that_names_a_model_that_is_not_there(harness, case, tmp_path):
    ran = harness("suite", case, "--matrix", matrix(tmp_path, 'model = ["/no/such/model"]'), "--local-files-only")
    assert ran.status == 2
    assert ran.err.startswith("H001: ")
    assert "llama[model]" in ran.err


def test_two_cases_of_one_name(harness, case, tmp_path):
    another = tmp_path / "other" / "llama.toml"
    another.parent.mkdir()
    another.write_text(case.read_text())
    ran = harness("suite", case, another)
    assert ran.status == 2
    assert ran.err.startswith("H130: two cases have one name\n  where:    llama\n")


def test_an_environment_without_an_interpreter(harness, case, tmp_path):
    text = '[[rules]]\nenvironment = "e"\n[environments.e]\npython = "/no/python"'
    ran = harness("suite", case, "--matrix", matrix(tmp_path, text))
    assert ran.status == 2
    assert ran.err.startswith("H130: the environment 'e' has no interpreter with the harness")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "H013: there is nothing to run"),
        (["--jobs", "2", "--ray", "auto"], "H013: a suite runs on this machine or on a cluster"),
        (["--store", "/tmp/store"], "H013: processes of one machine share its cache"),
        (["--resume"], "H013: a suite goes on in the folder"),
        (["--jobs", "0"], "H013: "),
        (["--out", ""], "H013: --out is given empty"),
        (["--out", "{tmp}/none", "--resume"], "H138: there is no suite to go on with"),
        (["--out", "{tmp}"], "H030: "),
    ],
)
def test_options_that_make_no_sense(harness, case, tmp_path, arguments, says):
    filled = [argument.format(tmp=tmp_path) for argument in arguments]
    ran = harness("suite", *([case] if filled else ["run"]), *filled)
    assert ran.status == 2
    assert ran.err.startswith(says), ran.err


def test_resources_that_no_machine_has_are_said_at_once(harness, case, tmp_path):
    ran = harness("suite", case, "--matrix", matrix(tmp_path, "[[rules]]\nmemory_gib = 1e6"))
    assert ran.status == 2
    assert ran.err.startswith("H133: ")
    assert "1e+06 GiB" in ran.err


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "ray://x:1", "http://a:2"])
def test_a_cluster_that_cannot_be_reached_is_said_at_once(harness, case, address):
    ran = harness("suite", case, "--ray", address)
    assert ran.status == 2
    assert ran.err.startswith("H132: ")


def suite_file(folder: Path, **cases: tuple[str, float]) -> Path:
    folder.mkdir()
    entries = [
        {"name": name, "verdict": verdict, "labels": {}, "seconds": seconds}
        for name, (verdict, seconds) in cases.items()
    ]
    document = {"schema_version": 1, "elapsed_s": 1.0, "cases": entries}
    (folder / "suite.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    ("new", "status", "says"),
    [
        ({"a": ("pass", 1.0), "b": ("mismatch", 1.0)}, 0, "2 cases ended as before"),
        ({"a": ("error", 1.0), "b": ("mismatch", 1.0)}, 1, "new failures (1)\n  a\n    pass -> error"),
        ({"a": ("pass", 1.0), "b": ("pass", 1.0)}, 0, "new passes (1)"),
        ({"a": ("pass", 9.0), "b": ("mismatch", 1.0)}, 4, "slower (1)"),
        ({"a": ("pass", 1.0), "b": ("mismatch", 1.0), "c": ("lost", 1.0)}, 1, "added cases that fail (1)"),
    ],
)
def test_what_changed_since_yesterday(harness, tmp_path, new, status, says):
    old = suite_file(tmp_path / "old", a=("pass", 1.0), b=("mismatch", 1.0))
    ran = harness("suite", "diff", old, suite_file(tmp_path / "new", **new))
    assert ran.status == status
    assert says in ran.out
    assert harness("suite", "diff", old, tmp_path / "new", "--format", "json").json["schema_version"] == 1


def test_what_is_no_suite_cannot_be_compared(harness, tmp_path):
    ran = harness("suite", "diff", tmp_path, tmp_path)
    assert ran.status == 2
    assert ran.err.startswith("H138: the file is no suite's result: ")


def test_a_suite_over_time(harness, tmp_path):
    suite_file(tmp_path / "1", a=("pass", 1.0), b=("pass", 1.0))
    suite_file(tmp_path / "2", a=("pass", 1.0), b=("error", 1.0))
    page = tmp_path / "page.html"
    ran = harness("suite", "history", tmp_path / "1", tmp_path / "2", "--out", page)
    assert ran.status == 1
    assert "1 not passing, 1 of them new" in ran.out
    assert page.read_text().startswith("<!doctype html>")
    assert harness("suite", "history", tmp_path, "--format", "json").json["cases"][1]["first_failure"] == 1
    assert harness("suite", "history", tmp_path / "1").status == 0
    assert harness("suite", "history", tmp_path / "1", "--out", page).err.startswith("H030: ")
    assert harness("suite", "history", tmp_path / "none").err.startswith("H138: ")


@pytest.mark.slow
def test_ctrl_c_ends_every_worker_and_keeps_what_is_finished(case, tmp_path):
    text = matrix(tmp_path, f"schedule = {[f'chunked:{size}' for size in (2, 3)]}")
    command = [sys.executable, "-c", "from harness.cli import main; main()", "suite", str(case), "--matrix", str(text)]
    out = tmp_path / "out"
    suite = subprocess.Popen(
        [*command, "--jobs", "2", "--out", str(out)], stderr=subprocess.PIPE, preexec_fn=listen_to_ctrl_c
    )
    while not (out / "journal.jsonl").exists():
        time.sleep(0.05)
    time.sleep(1.0)  # the workers import torch
    suite.send_signal(signal.SIGINT)
    _, err = suite.communicate(timeout=600)  # workers that live on would hold the pipe open
    assert suite.returncode == 130
    assert err.decode().endswith("interrupted\n")
    assert json.loads((out / "journal.jsonl").read_text().splitlines()[0])["record"] == "suite"


@pytest.mark.slow
def test_a_suite_with_a_wrong_engine_and_one_that_crashes(harness, install, case, tmp_path):
    install(WRONG, name="foreign")
    install(CRASHES, name="crashing")
    out = tmp_path / "out"
    text = matrix(tmp_path, MATRIX)
    ran = harness("suite", case, "--matrix", text, "--jobs", "1", "--out", out, "--format", "json")
    assert ran.status == 1, ran.err
    by_name = {item["name"]: item for item in ran.json["cases"]}
    assert {name: item["verdict"] for name, item in by_name.items()} == {
        "llama[reference]": "pass", "llama[foreign]": "mismatch", "llama[crashing]": "error",
    }  # fmt: skip
    wrong = by_name["llama[foreign]"]
    assert wrong["first_divergence"]["tap"].startswith("model.layers.1.mlp.down_proj")
    assert (out / wrong["report"]).read_text().startswith("<!doctype html>")
    assert wrong["report"] in (out / "suite.html").read_text()
    assert by_name["llama[crashing]"]["code"] == "H017"
    assert json.loads((out / "suite.json").read_text()) == ran.json
    again = harness("suite", case, "--matrix", text, "--out", out, "--resume", "--format", "json")
    assert again.json["cases"] == ran.json["cases"]
    assert again.json["num_resumed"] == 3


@pytest.mark.slow
def test_nights_of_an_engine_that_breaks_are_a_history(harness, install, case, tmp_path):
    text = matrix(tmp_path, 'engine = ["foreign"]')
    for night, code in enumerate((ENGINE, ENGINE, WRONG)):
        install(code, name="foreign")
        out = tmp_path / "nights" / str(night)
        harness("suite", case, "--matrix", text, "--jobs", "1", "--out", out, "--label", f"c{night}")
    ran = harness("suite", "history", tmp_path / "nights", "--format", "json")
    assert ran.status == 1, ran.err
    assert [run["label"] for run in ran.json["runs"]] == ["c0", "c1", "c2"]
    (trend,) = ran.json["cases"]
    assert (trend["last_pass"], trend["first_failure"], trend["changed_bits"]) == (1, 2, [2])
    assert trend["runs"][2]["first_divergence"]["tap"].startswith("model.layers.1.mlp.down_proj")


@pytest.mark.slow
def test_a_suite_is_not_resumed_over_weights_that_were_replaced(harness, llama, tmp_path):
    model, out = shutil.copytree(llama, tmp_path / "model"), tmp_path / "out"
    (tmp_path / "one.toml").write_text(CASE.format(model=model))
    first = harness("suite", tmp_path / "one.toml", "--out", out, "--jobs", "1", "--format", "json")
    assert (first.status, first.json["num_resumed"]) == (0, 0)
    again = harness("suite", tmp_path / "one.toml", "--out", out, "--jobs", "1", "--resume", "--format", "json")
    assert (again.status, again.json["num_resumed"]) == (0, 1)
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    broken = {name: tensor * float("nan") for name, tensor in tensors.items()}
    safetensors.torch.save_file(broken, model / "model.safetensors", metadata={"format": "pt"})
    after = harness("suite", tmp_path / "one.toml", "--out", out, "--jobs", "1", "--resume", "--format", "json")
    assert after.status in (1, 2)
    assert after.json["num_resumed"] == 0
    assert after.json["counts"]["pass"] == 0


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_nothing_running_and_is_resumed(case, tmp_path):
    text = matrix(tmp_path, f"schedule = {[f'chunked:{size}' for size in (2, 3)] + ['plain']}")
    command = [sys.executable, "-c", "from harness.cli import main; main()", "suite", str(case), "--matrix", str(text)]
    command += ["--jobs", "1", "--out", str(tmp_path / "out"), "--format", "json"]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    journal = tmp_path / "out" / "journal.jsonl"
    deadline = time.monotonic() + 300
    while not (journal.exists() and b'"record": "case"' in journal.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    done = journal.read_bytes().count(b'"record": "case"')
    ran = subprocess.run([*command, "--resume"], stdout=subprocess.PIPE, check=False)
    document = json.loads(ran.stdout)
    assert ran.returncode == 0
    assert document["counts"]["pass"] == 3
    assert document["num_resumed"] == done > 0
