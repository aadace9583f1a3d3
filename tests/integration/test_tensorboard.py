"""Traces in TensorBoard: the profiler plugin's own loader, and a running TensorBoard asked for its views."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

LOADER = """
import json, sys
from torch_tb_profiler.profiler.data import RunProfileData
cache, *paths = sys.argv[1:]
for path in paths:
    profile = RunProfileData.parse("worker", "1", path, cache)
    profile.process()
    calls = {operator.name: operator.calls for operator in profile.op_list_groupby_name}
    print(json.dumps({"steps": profile.steps_names, "calls": calls}))
"""
PLUGIN = "data/plugin/pytorch_profiler"
START_S = 600

pytestmark = pytest.mark.skipif(
    find_spec("torch_tb_profiler") is None, reason="torch-tb-profiler is not installed (pip install torch-tb-profiler)"
)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> Path:
    """A profile of the reference engine, traces of two phases."""
    from harness.cli.main import run

    out = tmp_path_factory.mktemp("tensorboard") / "profile"
    options = ["--prompt-tokens", "24", "--max-new-tokens", "6", "--runs", "1", "--phase", "prefill"]
    assert run(["profile", *options, "--phase", "decode", "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_the_plugins_loader_reads_a_trace(profiled, tmp_path):
    paths = [*(profiled / "trace").glob("reference-prefill-*"), *(profiled / "trace").glob("reference-decode-*")]
    command = [sys.executable, "-c", LOADER, tmp_path, *paths]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for line, num_steps in zip(ran.stdout.splitlines()[-2:], (1, 3), strict=True):
        trace = json.loads(line)
        assert len(trace["steps"]) == num_steps
        assert trace["calls"]["aten::mm"] == 13 * num_steps
        assert [name for name in trace["calls"] if name.startswith(("model.", "engine."))] == [], (
            "spans are no operators"
        )


@pytest.mark.slow
def test_a_running_tensorboard_shows_the_traces(profiled, tmp_path):
    log = tmp_path / "log.txt"
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(profiled),
        "--port",
        "0",
        "--host",
        "127.0.0.1",
    ]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as server:
        try:
            address = wait_for(lambda: re.search(r"http://127\.0\.0\.1:\d+/", log.read_text()), log)[0]
            run = wait_for(lambda: get(f"{address}{PLUGIN}/runs")["runs"], log)[0]
            workers = wait_for(lambda: get(f"{address}{PLUGIN}/workers?run={run}&view=Overview"), log)
            assert set(workers) == {"reference-decode-r0", "reference-prefill-r0"}
            where = f"run={run}&worker=reference-decode-r0&span=1"
            assert get(f"{address}{PLUGIN}/overview?{where}")["steps"]["rows"]
            table = get(f"{address}{PLUGIN}/operation/table?{where}&group_by=Operation")
            assert "aten::mm" in json.dumps(table)
            trace = urllib.request.urlopen(f"{address}{PLUGIN}/trace?{where}", timeout=START_S).read()
            assert b"traceEvents" in trace or trace[:2] == b"\x1f\x8b"
        finally:
            server.terminate()


def get(address: str):
    with urllib.request.urlopen(address, timeout=START_S) as answer:
        return json.loads(answer.read())


def wait_for(look, log: Path):
    """Look until there is something to see."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            seen = look()
        except (OSError, ValueError):
            seen = None
        if seen:
            return seen
        time.sleep(0.5)
    raise AssertionError(f"nothing came within {START_S} s: {log.read_text()}")
