"""A suite on a cluster of two nodes on this machine: goldens travel, and a node that is killed loses nothing."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings
MATRIX = """
model = ["llama-tiny", "qwen3-tiny"]
dtype = ["float32"]
schedule = ["plain", "chunked:2", "chunked:3"]
[prompts.one]
requests = [{token_ids = [1, 4, 5, 6, 7]}]
max_new_tokens = 2
[prompts.two]
requests = [{token_ids = [1, 4, 5, 6, 8]}]
max_new_tokens = 2
"""
SMALL = 80 << 20


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A head without CPUs, and a function that adds nodes, each with a cache of its own."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": SMALL, "include_dashboard": False}
    )
    cluster.add = lambda name, **more: cluster.add_node(
        num_cpus=1, object_store_memory=SMALL, env_vars={"HARNESS_CACHE": str(tmp_path / name), **more}
    )
    yield cluster
    cluster.shutdown()


def start(tmp_path: Path, address: str, *options: str) -> "subprocess.Popen[bytes]":
    (tmp_path / "matrix.toml").write_text(MATRIX)
    command = [sys.executable, "-c", "from harness.cli import main; main()", "suite", "--format", "json"]
    command += ["--matrix", str(tmp_path / "matrix.toml"), "--out", str(tmp_path / "out"), "--ray", address, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def num_done(tmp_path: Path) -> int:
    journal = tmp_path / "out" / "journal.jsonl"
    return journal.read_bytes().count(b'"record": "case"') if journal.exists() else 0


def test_a_node_is_killed_and_every_case_ends_once(cluster, tmp_path):
    first, second = cluster.add("one"), cluster.add("two")
    assert first != second
    suite = start(tmp_path, cluster.address)
    deadline = time.monotonic() + 300
    while num_done(tmp_path) < 3 and suite.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    cluster.remove_node(second, allow_graceful=False)
    out, err = suite.communicate(timeout=600)
    assert suite.returncode == 0, err.decode()
    document = json.loads(out)
    assert document["counts"] == {"pass": 12, "mismatch": 0, "error": 0, "lost": 0}
    assert document["num_goldens"] == 4
    assert num_done(tmp_path) == 12, "the journal has each case once"
    assert sum(case["attempts"] > 1 for case in document["cases"]) <= 2, "a dead node takes few tasks with it"


def test_what_a_cluster_lacks_is_said_at_once(cluster, tmp_path):
    cluster.add("one")
    text = MATRIX + "[[rules]]\ncpus = 64\n"
    (tmp_path / "large.toml").write_text(text)
    suite = start(tmp_path, cluster.address, "--matrix", str(tmp_path / "large.toml"))
    _, err = suite.communicate(timeout=600)
    assert suite.returncode == 2
    assert err.decode().startswith("H133: no machine has the resources")
