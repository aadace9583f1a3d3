"""`harness server check` against vLLM's OpenAI server, in processes of its own on the loopback address."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("httpx", reason="needs httpx (extra serve)")

from harness.cli.main import run

from ..loopback import answers, free_port, until

pytestmark = pytest.mark.slow
STARTS_WITHIN_S = 300
"""Three processes import vLLM one after the other: 25 s each on a busy machine."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
WORKLOAD = ["--token-ids", "1,4,5,6,7,8,9,10,11,12,13", "--token-ids", "1,9,10,40,50", "--max-new-tokens", "8"]


@pytest.fixture(scope="module")
def served(checkpoints, tmp_path_factory):
    """Serve a model in bfloat16; yield its URL, and the checkpoint."""
    model = checkpoints / "qwen3-tiny"
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--max-model-len", "256", "--kv-cache-memory-bytes", str(64 << 20)]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as out:
        environment = {**os.environ, **ONE_THREAD, "HF_HUB_OFFLINE": "1"}
        # A session of its own: what is left of its processes is ended together.
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        until(
            lambda: process.poll() is not None or answers(f"{url}/health"), what="it answers", seconds=STARTS_WITHIN_S
        )
        assert process.poll() is None, f"the server ended: {log.read_text(errors='replace')[-2000:]}"
        yield url, model
    finally:
        stop(process)


def stop(process):
    """End a server gently, and then whatever is left of its session."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def check(url, model, *options):
    options = [*WORKLOAD, "--dtype", "bfloat16", "--request-timeout", "120", *options, "--format", "json"]
    return run(["server", "check", "--endpoint", url, "--model", str(model), *options])


def test_a_sound_server_passes(served, capsys):
    status = check(*served)
    out = capsys.readouterr().out
    assert status == 0, out
    assert {item["schedule"] for item in json.loads(out)["runs"]} >= {"together", "repeated", "alone", "streamed"}


def test_another_rotary_base_is_found(served, capsys, tmp_path):
    url, model = served
    changed = shutil.copytree(model, tmp_path / "other")
    config = json.loads((changed / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] /= 100
    (changed / "config.json").write_text(json.dumps(config))
    status = check(url, changed, "--again", "0")
    assert status == 1, capsys.readouterr()
