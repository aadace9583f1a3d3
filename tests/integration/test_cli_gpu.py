"""The command line on a GPU, or on the pretended one: whole commands, whose verdicts are those of the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.quantised_checkpoints import write_quantised

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "cases" / "checkpoints" / "qwen3-tiny")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the harness, or `generate`, on the device that the tests run on."""
    command = ["-m", "reference_engine" if arguments[0] == "generate" else "harness"]
    if "tests.pretended_gpu.plugin" in sys.modules:
        command = ["-m", "tests.pretended_gpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_check(dtype):
    done = run(
        "check", "--device", "cuda", "--dtype", dtype, "--schedule", "plain", "--schedule", "mixed", "--format", "json"
    )
    result = json.loads(done.stdout)
    assert (done.returncode, result["verdict"], result["device"]) == (0, "pass", "cuda"), done.stderr


def test_a_check_of_a_sample_of_rows():
    done = run("check", "--device", "cuda", "--schedule", "plain", "--rows", "4", "--format", "json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["verdict"]) == (0, "pass"), done.stderr
    assert result["runs"][0]["coverage"]["rows_left_out"] > 0


def test_hf_forked_and_preempted():
    done = run("check", "--engine", "hf", "--device", "cuda", "--schedule", "forked,preempted", "--format", "json")
    assert json.loads(done.stdout)["verdict"] == "pass", done.stderr


@pytest.mark.parametrize("name", ["w8a8", "deepseek"])
def test_a_quantised_checkpoint(tmp_path, name):
    folder = tmp_path / name
    write_quantised(Path(MODEL), folder, name)
    done = run(
        "check", "--device", "cuda", "--model", str(folder), "--engine-option", "weights=checkpoint",
        "--engine-option", "attention_backend=triton", "--engine-option", "kv_cache_dtype=float8_e4m3fn",
        "--token-ids", "1,5,9,33,77,120,4", "--max-new-tokens", "3", "--dtype", "bfloat16", "--format", "json",
    )  # fmt: skip
    assert json.loads(done.stdout)["verdict"] == "pass", done.stdout


def test_faults_whose_code_makes_tensors_of_its_own():
    tried = (
        "wrong-block", "rotary-interleaved", "last-token-unread", "position-decode-plus-one", "rope-theta",
        "tied-head-not-loaded", "logits-of-the-draft-before", "hit-positions-restart", "sums-bf16", "slot-at-boundary",
    )  # fmt: skip
    done = run("faults", "--device", "cuda", "--format", "json", *(word for id in tried for word in ("--only", id)))
    assert done.returncode == 0, done.stderr
    (tool,) = json.loads(done.stdout)["tools"]
    assert all(fault["row"] and fault["named"] for fault in tool["faults"])


def test_a_search():
    done = run("fuzz", "run", "--device", "cuda", "--seconds", "40", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "pass"


def test_a_profile(tmp_path):
    done = run("profile", "--model", MODEL, "--device", "cuda", "--quick", "--out", str(tmp_path / "profile"))
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "profile").glob("**/*.json*"))


def test_a_drawn_continuation():
    done = run(
        "generate", "--model", MODEL, "--device", "cuda", "--prompt", "hu", "--temperature", "0.8", "--seed", "3"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
