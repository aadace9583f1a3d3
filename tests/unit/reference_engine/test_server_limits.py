"""Requests that are made to hurt the server: each gets an error, and all others are served as if it had not come."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from reference_engine import EngineConfig, LLMEngine

from ...loopback import serving

httpx = pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from reference_engine.server import connections, limits  # noqa: E402
from reference_engine.server.app import build_app  # noqa: E402
from reference_engine.server.text import Text  # noqa: E402

FOLDER = Path(__file__).parents[3] / "cases" / "checkpoints" / "qwen3-tiny"
PROMPT = [1, 64, 155, 143, 3, 64]
PLAIN = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(dtype="float32", max_num_seqs=16, enable_prefix_caching=True)
    with LLMEngine(FOLDER, config) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine):
    app = build_app(engine, Text(FOLDER), model="tiny")
    with serving(app, http=connections.ImpatientProtocol) as url:
        yield url


@pytest.fixture
def client(url):
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client


def tokens(client, **body):
    answer = client.post("/v1/completions", json={**PLAIN, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def completion(**body):
    return "/v1/completions", json.dumps({"prompt": "hu", **body})


HOSTILE = {
    "top_k of int64": completion(top_k=2**63 - 1),
    "top_k beyond int64": completion(top_k=2**63),
    "top_k below": completion(top_k=-2),
    "seed beyond int64": completion(seed=2**64),
    "max_tokens of int64": completion(max_tokens=2**63 - 1),
    "a token of 400 digits": completion(prompt=[10**400]),
    "a token of 5000 digits": ("/v1/completions", '{"prompt": [' + "9" * 5000 + "]}"),
    "a negative token": completion(prompt=[-1]),
    "a token that is true": completion(prompt=[True]),
    "a stop token of 400 digits": completion(stop_token_ids=[10**400]),
    "temperature of 1e300": completion(temperature=1e300),
    "temperature NaN": completion(temperature=float("nan")),
    "temperature Infinity": completion(temperature=float("inf")),
    "penalty of 1e300": completion(repetition_penalty=1e300),
    "too many choices": completion(prompt=["a"] * 200, n=16),
    "too many stops": completion(stop=["a"] * 17),
    "an empty stop": completion(stop=""),
    "a long stop": completion(stop="a" * 2000),
    "half a surrogate pair": ("/v1/completions", '{"prompt": "\\ud800"}'),
    "half a surrogate pair to stop at": ("/v1/completions", '{"prompt": "a", "stop": "\\ud800"}'),
    "half a surrogate pair as a field": ("/v1/completions", '{"prompt": "a", "\\ud800": 1}'),
    "half a surrogate pair as a model": ("/v1/completions", '{"prompt": "a", "model": "\\ud800"}'),
    "half a surrogate pair in a chat": ("/v1/chat/completions", '{"messages": [{"content": "\\ud800"}]}'),
    "half a surrogate pair to tokenize": ("/tokenize", '{"prompt": "\\ud800"}'),
    "a token of 400 digits to detokenize": ("/detokenize", json.dumps({"tokens": [10**400]})),
    "nested lists": ("/v1/completions", '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "nested messages": ("/v1/chat/completions", '{"messages": [{"a": ' + "[" * 900 + "]" * 900 + "}]}"),
    "no JSON": ("/v1/completions", "{"),
    "no UTF-8": ("/v1/completions", b'{"prompt": "\xff"}'),
    "a list": ("/v1/completions", "[]"),
    "nothing": ("/v1/completions", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_and_the_server_serves_on(client, name):
    path, body = HOSTILE[name]
    content = body if isinstance(body, bytes) else body.encode()
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert client.get("/health").json() == {"status": "ok", "num_requests": 0}
    assert len(tokens(client)) == 6


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e6])
def test_a_temperature_at_the_edge_is_served(client, temperature):
    assert len(tokens(client, temperature=temperature, top_k=2**31 - 1, min_p=0.5, top_p=1e-9)) == 6


def test_a_body_that_is_too_large_is_not_read(client, url, monkeypatch):
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 10_000)
    answer = client.post("/v1/completions", content=b" " * 10_001)
    assert (answer.status_code, answer.json()["error"]["message"]) == (413, "the body is larger than 10,000 bytes")
    answer = client.post("/v1/completions", content=iter([b" " * 6_000] * 2))  # chunked: without its length
    assert answer.status_code == 413
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 400000000000\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def closes(url, *parts):
    """Send the parts of a request slowly, and return how long the server listens and what it says."""
    host, port = url.removeprefix("http://").split(":")
    begin = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
        try:
            said = connection.recv(1000)
        except ConnectionError:
            said = b""
    return time.monotonic() - begin, said


@pytest.mark.parametrize("begin", [b"", b"POST /tokenize HTTP/1.1\r\nhost:"], ids=["nothing", "half of the headers"])
def test_headers_that_do_not_come_end_the_connection(url, monkeypatch, begin):
    monkeypatch.setattr(connections, "HEADERS_S", 0.3)
    seconds, said = closes(url, begin)
    assert said == b""
    assert 0.2 < seconds < 8


def test_headers_that_do_not_come_a_second_time_end_the_connection(url, monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_S", 0.3)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(4000).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /health HTTP/1.1\r\nho")
        end = b"."
        while end:
            try:
                end = connection.recv(4000)
            except ConnectionError:
                break


def test_a_body_that_does_not_come_is_not_waited_for(url, monkeypatch):
    monkeypatch.setattr(limits, "BODY_S", 0.3)
    _, said = closes(url, b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 40\r\n\r\n", b'{"prompt"')
    assert said.startswith(b"HTTP/1.1 408")


def test_a_client_that_does_not_read_is_dropped(monkeypatch):
    monkeypatch.setattr(connections, "UNREAD_S", 0.3)

    async def pour(scope, _receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(1000):
                await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})

    with serving(pour, http=connections.ImpatientProtocol) as url, socket.socket() as connection:
        host, port = url.removeprefix("http://").split(":")
        connection.settimeout(30)
        connection.connect((host, int(port)))
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        time.sleep(2)
        received = 0
        with suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                received += len(part)
    assert received < 30 << 20


# The engine's loop


@pytest.fixture
def failing(monkeypatch, engine):
    """Let each step fail that computes a request with a token."""

    def fail_with(token_id, *, times=10**9):
        run, left = engine.runner.run, [times]

        def failing_run(chunks, observer=None):
            if left[0] and any(token_id in chunk.sequence.token_ids for chunk in chunks):
                left[0] -= 1
                raise RuntimeError("out of luck")
            return run(chunks, observer)

        monkeypatch.setattr(engine.runner, "run", failing_run)

    return fail_with


def test_a_request_that_fails_a_step_fails_alone(client, failing):
    prompts = [[*PROMPT, 20 + at] for at in range(6)]
    body = {"max_tokens": 40}
    expected = [tokens(client, prompt=prompt, **body) for prompt in prompts]
    failing(222)
    bad = {**PLAIN, "prompt": [1, 222, 5]}
    with ThreadPoolExecutor(12) as pool:
        good = [pool.submit(tokens, client, prompt=prompt, **body) for prompt in prompts]
        wrong = [pool.submit(client.post, "/v1/completions", json=bad) for _ in range(4)]
        assert [item.result() for item in good] == expected
        for item in wrong:
            answer = item.result()
            assert answer.status_code == 500
            assert "the engine fails with this request: RuntimeError: out of luck" in answer.json()["error"]["message"]
    assert client.get("/health").json() == {"status": "ok", "num_requests": 0}


def test_a_step_that_fails_once_ends_no_more_than_one_request(client, failing):
    prompts = [[*PROMPT, 222, 20 + at] for at in range(6)]
    expected = [tokens(client, prompt=prompt, max_tokens=30) for prompt in prompts]
    failing(222, times=1)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: client.post(
            "/v1/completions", json={**PLAIN, "prompt": prompt, "max_tokens": 30}), prompts))  # fmt: skip
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) >= 5
    for answer, token_ids in zip(answers, expected, strict=True):
        assert answer.status_code == 500 or answer.json()["choices"][0]["token_ids"] == token_ids


def test_a_client_that_leaves_during_a_trial_leaves_nothing(client, failing, engine):
    failing(222)
    body = {**PLAIN, "prompt": [*PROMPT, 9], "max_tokens": 200}
    left = threading.Event()

    def leave():
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            next(answer.iter_lines())
        left.set()

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(leave) for _ in range(3)]
        jobs += [pool.submit(client.post, "/v1/completions", json={**PLAIN, "prompt": [1, 222]}) for _ in range(4)]
        for job in jobs:
            job.result()
    assert len(tokens(client)) == 6
    end = time.monotonic() + 20
    while client.get("/health").json()["num_requests"]:
        assert time.monotonic() < end
    assert not engine.has_unfinished()
