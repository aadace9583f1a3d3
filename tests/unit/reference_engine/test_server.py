"""The engine behind HTTP: every answer is what the engine gives by itself, and nothing outlives its reader."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reference_engine import EngineConfig, LLMEngine, SamplingParams

from ...loopback import serving, until

httpx = pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from reference_engine.server.app import build_app  # noqa: E402
from reference_engine.server.text import Text  # noqa: E402

FOLDER = Path(__file__).parents[3] / "cases" / "checkpoints" / "qwen3-tiny"
PROMPT = [1, 64, 155, 143, 3, 64]
TEXT = "hu rin pun | hu"
LONG = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(dtype="float32", max_num_seqs=64, enable_prefix_caching=True)
    with LLMEngine(FOLDER, config) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine):
    app = build_app(engine, Text(FOLDER), model="tiny")
    with serving(app) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


def post(client, path, **body):
    return client.post(path, json={"temperature": 0, **body})


def complete(client, **body):
    answer = post(client, "/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client, path, **body):
    with client.stream("POST", path, json={"temperature": 0, "stream": True, **body}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture(scope="module")
def alone():
    """What the engine gives without a server."""

    def generate(prompt, **params):
        with LLMEngine(FOLDER, EngineConfig(dtype="float32")) as engine:
            return engine.generate([prompt], SamplingParams(**params))[0]

    return generate


def test_a_completion_is_what_the_engine_gives(client, alone):
    expected = alone(PROMPT, max_new_tokens=6, num_logprobs=3, ignore_eos=True)
    answer = complete(
        client, prompt=PROMPT, max_tokens=6, logprobs=3, ignore_eos=True,
        return_token_ids=True, return_tokens_as_token_ids=True,
    )  # fmt: skip
    (choice,) = answer["choices"]
    assert choice["token_ids"] == list(expected.token_ids)
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in expected.token_ids]
    assert logprobs["token_logprobs"] == pytest.approx(
        [token_logprobs.logprob for token_logprobs in expected.logprobs], abs=1e-4
    )
    assert [list(top) for top in logprobs["top_logprobs"]] == [
        [f"token_id:{token_id}" for token_id, _ in token_logprobs.top] for token_logprobs in expected.logprobs
    ]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 6, "total_tokens": 12}


def test_text_is_joined_to_the_prompts_text(client):
    (choice,) = complete(client, prompt=TEXT, max_tokens=2)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" rin pun", "length")
    (choice,) = complete(client, prompt=TEXT, max_tokens=2, echo=True)["choices"]
    assert choice["text"] == "hu rin pun | hu rin pun"


def test_a_stream_has_the_same_tokens_text_and_logprobs(client):
    body = {"prompt": TEXT, "max_tokens": 5, "logprobs": 2, "return_token_ids": True}
    (whole,) = complete(client, **body)["choices"]
    parts = events(client, "/v1/completions", **body, stream_options={"include_usage": True})
    *parts, last = parts
    choices = [part["choices"][0] for part in parts]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for choice in choices for value in choice["logprobs"][name]]
        if name == "token_logprobs":
            assert joined == pytest.approx(whole["logprobs"][name], abs=1e-4)
        elif name != "top_logprobs":
            assert joined == whole["logprobs"][name]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [whole["finish_reason"]]
    assert last["usage"]["completion_tokens"] == len(whole["token_ids"])


def test_the_echo_has_logprobs_of_the_prompt(client, alone):
    forced = alone(PROMPT[:1], max_new_tokens=5, forced_token_ids=PROMPT[1:], num_logprobs=1, ignore_eos=True)
    (choice,) = complete(client, prompt=PROMPT, max_tokens=1, logprobs=1, echo=True)["choices"]
    first, *others = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert others[:5] == pytest.approx([token_logprobs.logprob for token_logprobs in forced.logprobs], abs=1e-4)
    assert len(others) == 6
    (choice,) = complete(client, prompt=PROMPT, max_tokens=0, logprobs=1, echo=True)["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 6


def test_several_prompts_and_choices_keep_their_order(client):
    body = {"max_tokens": 3, "return_token_ids": True}
    both = complete(client, prompt=[PROMPT, PROMPT[:3]], n=2, **body)["choices"]
    single = [complete(client, prompt=prompt, **body)["choices"][0]["token_ids"] for prompt in (PROMPT, PROMPT[:3])]
    assert [choice["index"] for choice in both] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in both] == [single[0], single[0], single[1], single[1]]
    parts = events(client, "/v1/completions", prompt=[PROMPT, PROMPT[:3]], n=2, **body)
    streamed = [[], [], [], []]
    for part in parts:
        streamed[part["choices"][0]["index"]] += part["choices"][0]["token_ids"]
    assert streamed == [choice["token_ids"] for choice in both]


def test_stop_strings_are_cut_off_in_both_forms(client):
    body = {"prompt": TEXT, "max_tokens": 8, "stop": [" pun"]}
    (whole,) = complete(client, **body)["choices"]
    parts = [part["choices"][0] for part in events(client, "/v1/completions", **body)]
    assert (whole["text"], whole["finish_reason"]) == (" rin", "stop")
    assert "".join(part["text"] for part in parts) == " rin"
    assert parts[-1]["finish_reason"] == "stop"


def test_draws_depend_on_the_seed_alone(client):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 3.0, "ignore_eos": True, "return_token_ids": True}
    drawn = [complete(client, seed=seed, **body)["choices"][0]["token_ids"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_many_clients_are_served_at_once_and_each_gets_its_own(client, engine, monkeypatch):
    sizes, step = [], engine.runner.run
    monkeypatch.setattr(
        engine.runner, "run", lambda chunks, observer: sizes.append(len(chunks)) or step(chunks, observer)
    )
    bodies = [{"prompt": [*PROMPT, 3 + at], "max_tokens": 20, "ignore_eos": True} for at in range(8)]
    expected = [complete(client, **body)["choices"][0]["text"] for body in bodies]
    assert max(sizes) == 1
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda body: complete(client, **body)["choices"][0]["text"], bodies))
    assert texts == expected
    assert max(sizes) > 1


@pytest.fixture
def aborted(engine, monkeypatch):
    """Requests that were aborted."""
    aborted, abort = [], engine.abort
    monkeypatch.setattr(engine, "abort", lambda request_id: abort(request_id) or aborted.append(request_id))
    return aborted


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_its_request_along(client, engine, aborted, stream):
    body = json.dumps({**LONG, "max_tokens": 500, "stream": stream}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.sendall(head.encode() + b"\r\n" + body)
        until(engine.has_unfinished, what="the request is running")
    until(lambda: aborted, what="the request is aborted")
    assert not engine.has_unfinished()
    assert client.get("/health").json() == {"status": "ok", "num_requests": 0}


def test_leaving_in_the_middle_of_a_stream_frees_the_blocks(client, engine, aborted):
    free = engine.pool.num_free
    with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        next(answer.iter_lines())
    until(lambda: not engine.has_unfinished(), what="the engine is idle")
    assert len(aborted) == 1
    assert engine.pool.num_free == free


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1, 256]}, "outside the vocabulary"),
        ({"prompt": "hu", "max_tokens": 1000}, "max_new_tokens"),
        ({"prompt": "hu", "temperature": -1}, "temperature is impossible"),
        ({"prompt": "hu", "presence_penalty": 2.5}, "presence_penalty"),
        ({"prompt": "hu", "logit_bias": {"256": 1}}, "outside the vocabulary"),
        ({"prompt": "hu", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "hu", "logprobs": 101}, "logprobs"),
        ({"prompt": "hu", "grammar": "x"}, "grammar"),
        ({"prompt": "hu", "max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_what_is_not_served_is_refused(client, body, says, stream):
    answer = client.post("/v1/completions", json={**body, "stream": stream})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_other_models_and_pages_are_not_found(client):
    assert post(client, "/v1/completions", prompt="hu", model="gpt").status_code == 404
    assert client.get("/v2/models").status_code == 404
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_text_becomes_tokens_and_back(client):
    tokens = client.post("/tokenize", json={"prompt": TEXT}).json()
    assert tokens == {"tokens": PROMPT, "count": 6, "max_model_len": 512}
    assert client.post("/detokenize", json={"tokens": PROMPT}).json() == {"prompt": TEXT}


def test_a_chat_without_a_template_is_refused(client):
    answer = post(client, "/v1/chat/completions", messages=[{"role": "user", "content": "hu"}])
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]


@pytest.fixture
def with_template(engine, monkeypatch):
    text = Text(FOLDER)
    monkeypatch.setattr(text._chat_tokenizer, "chat_template", "{{ bos_token + messages[0]['content'] }}")
    headers = {"authorization": "Bearer secret"}
    app = build_app(engine, text, model="tiny", api_key="secret")
    with serving(app) as url, httpx.Client(base_url=url, timeout=600, headers=headers) as client:
        yield client


def test_a_chat_is_a_completion_of_its_template(with_template):
    messages = [{"role": "user", "content": TEXT}]
    body = {"messages": messages, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    answer = post(with_template, "/v1/chat/completions", **body).json()
    (plain,) = complete(with_template, prompt=TEXT, max_tokens=4, logprobs=2, return_token_ids=True)["choices"]
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": plain["text"]}
    assert (answer["prompt_token_ids"], choice["token_ids"]) == (PROMPT, plain["token_ids"])
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == plain["logprobs"]["tokens"]
    assert [entry["logprob"] for entry in entries] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    first, *parts = events(with_template, "/v1/chat/completions", **body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == plain["text"]


def test_a_key_is_asked_for_but_of_the_health_page(with_template):
    for headers in ({"authorization": "Bearer wrong"}, {"authorization": ""}):
        answer = with_template.get("/v1/models", headers=headers)
        assert answer.status_code == 401
        assert "secret" not in answer.text
        assert with_template.get("/health", headers=headers).status_code == 200
    assert with_template.get("/v1/models").status_code == 200


def test_a_step_that_fails_is_told_to_all_and_to_those_who_come_later(monkeypatch):
    with LLMEngine(FOLDER, EngineConfig(dtype="float32")) as engine:
        step, may_fail = engine.step, threading.Event()

        def fail():
            if may_fail.is_set():
                raise RuntimeError("out of luck")
            return step()

        monkeypatch.setattr(engine, "step", fail)
        app = build_app(engine, Text(FOLDER), model="tiny")
        with serving(app) as url, httpx.Client(base_url=url, timeout=600) as client:
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
                may_fail.set()
                assert any("out of luck" in line for line in lines)
            answer = client.post("/v1/completions", json=LONG)
            assert (answer.status_code, client.get("/health").status_code) == (503, 503)
            assert "out of luck" in answer.json()["error"]["message"]
