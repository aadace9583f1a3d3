"""`harness server check` against llama-cpp-python's own server, in a process of its own on the loopback address."""

import importlib.util
import subprocess
import sys

import pytest

from harness.extensions.llamacpp.gguf.writer import write_gguf

from ...loopback import answers, free_port, until

NEEDED = ("llama_cpp", "gguf", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"pip install 'llama-cpp-python[server]' gguf: without {MISSING}"),
]


@pytest.fixture
def served(stories, tmp_path):
    """Serve a model as GGUF with options of the server, and return its URL.

    The server takes text alone, and ends where the file has no vocabulary: the embedded checkpoints have none of BPE.
    """
    processes = []

    def served(*options):
        path = write_gguf(stories, tmp_path / "model.gguf", "F16")
        port = free_port()
        command = [sys.executable, "-m", "llama_cpp.server", "--model", str(path), "--port", str(port)]
        command += ["--logits_all", "true", "--n_ctx", "512", *options]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        url = f"http://127.0.0.1:{port}"
        until(lambda: answers(f"{url}/v1/models"), what="the server answers")
        return url

    yield served
    for process in processes:
        process.terminate()
        process.wait(600)


WORKLOAD = ["--prompt", "Once upon a time", "--prompt", "The cat sat", "--max-new-tokens", "8"]


def check(harness, url, model, *options):
    options = ["--dtype", "float16", "--concurrency", "1", *options, "--format", "json"]
    return harness("server", "check", "--endpoint", url, "--model", model, *WORKLOAD, *options)


def test_a_sound_server_passes(harness, served, stories):
    ran = check(harness, served(), stories, "--request-timeout", "600")
    assert ran.status == 0, ran.out
    assert {run["schedule"] for run in ran.json["runs"]} >= {"together", "repeated", "alone", "streamed"}


def test_a_rotary_base_of_the_servers_own_is_found(harness, served, stories):
    ran = check(harness, served("--rope_freq_base", "20000"), stories, "--request-timeout", "600", "--again", "0")
    assert ran.status == 1
