"""`reference-engine serve`: one line on standard output, and every way it ends."""

import signal
import socket
import subprocess
import sys

import pytest

from reference_engine.cli import API_KEY, _listen

from .commands import listen_to_ctrl_c

httpx = pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("end", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_serves_until_it_is_told_to_end(monkeypatch, end, status):
    monkeypatch.setenv(API_KEY, "only-from-the-environment")
    command = [sys.executable, "-m", "reference_engine", "serve", "--port", "0", "--dtype", "float32"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_ctrl_c
    )
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.stderr.read()
        with httpx.Client(base_url=url, timeout=600) as client:
            body = {"prompt": "hu rin pun | hu", "max_tokens": 2, "temperature": 0}
            assert client.post("/v1/completions", json=body).status_code == 401
            headers = {"authorization": "Bearer only-from-the-environment"}
            answer = client.post("/v1/completions", json=body, headers=headers).json()
            assert answer["choices"][0]["text"] == " rin pun"
            assert answer["model"] == "qwen3-tiny"
    finally:
        process.send_signal(end)
        out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (status, "")
    assert "Traceback" not in err
    assert "only-from-the-environment" not in err


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(engine):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = engine("serve", "--port", taken.getsockname()[1], "--model", "/not/there")
    assert ran.status == 2
    assert ran.err.startswith("ConfigError: the address cannot be listened at: ")
    assert "--port 0" in ran.err


def test_a_missing_package_is_named(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    ran = engine("serve", "--port", 0)
    assert ran.status == 2
    assert "pip install -e '.[serve]' in a checkout" in ran.err


def test_a_model_that_the_engine_cannot_serve_is_refused(engine, tmp_path):
    ran = engine("serve", "--port", 0, "--model", tmp_path)
    assert (ran.status, ran.err.split(":")[0]) == (2, "CheckpointError")


@pytest.mark.parametrize("option", ["folder", "=folder", "name="])
def test_an_adapter_has_a_name_and_a_folder(engine, option):
    ran = engine("serve", "--port", 0, "--lora", option)
    assert ran.status == 2
    assert "an adapter is NAME=FOLDER" in ran.err


def test_bodies_do_not_wait_for_their_headers_to_be_acknowledged():
    """asyncio sets it for sockets of its own only: each answer took 40 ms."""
    with _listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
