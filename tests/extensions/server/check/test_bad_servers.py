"""Every way in which a server is bad: a clear error, and the other requests are judged all the same."""

import asyncio
import socket

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from harness.errors import Code, HarnessError
from harness.extensions.server import client
from harness.extensions.server.address import API_KEY, Address
from harness.extensions.server.check.run import check_endpoint
from harness.results.check import Outcome

from ....loopback import serving
from .conftest import VICTIM, changed, reply, streams_alone


def refused(status, body, headers=()):
    async def spoil(_app, _scope, _receive, send, _body):
        await reply(send, body, status=status, headers=headers)

    return spoil


async def hang_up(_app, _scope, _receive, send, _body):
    await reply(send, b'{"choices": [', claims=100)


async def say_nothing(_app, _scope, _receive, _send, _body):
    await asyncio.sleep(30)


def nan(answer):
    if answer["choices"][0]["logprobs"]:
        answer["choices"][0]["logprobs"]["token_logprobs"][0] = float("nan")


def positive(answer):
    if answer["choices"][0]["logprobs"]:
        answer["choices"][0]["logprobs"]["token_logprobs"][0] = 0.5


def fewer(answer):
    choice = answer["choices"][0]
    choice["token_ids"] = choice.get("token_ids", [])[:-3]


def stops(answer):
    choice = answer["choices"][0]
    choice |= {"token_ids": choice.get("token_ids", [])[:2], "finish_reason": "stop"}


def more(answer):
    answer["choices"][0]["token_ids"] = [*answer["choices"][0].get("token_ids", []), 5]


def replaced(answer):
    answer["choices"][0]["token_ids"][0] = 77


def cut_short(answer):
    answer["choices"][0]["finish_reason"] = "abort"


BAD = {
    "429": (refused(429, b'{"error": {"message": "slow down"}}', ((b"retry-after", b"0.01"),)), "H111", "slow down"),
    "500": (refused(500, b"Traceback:\n boom"), "H111", "status 500: Traceback: boom"),
    "HTML": (refused(200, b"<html><h1>Welcome</h1></html>"), "H112", "<html><h1>Welcome</h1></html>"),
    "another JSON": (refused(200, b'{"message": "hello"}'), "H112", "no choices"),
    "an empty answer": (refused(200, b""), "H112", "no JSON: nothing"),
    "NaN": (changed(nan), "H042", "is nan"),
    "above 0": (changed(positive), "H117", "is 0.5"),
    "silence": (say_nothing, "H113", "said nothing for 5 s"),
    "fewer tokens": (changed(fewer), "H116", "5 tokens where 8 were asked for"),
    "an end where there is none": (changed(stops), "H116", "stops after 2 tokens, where the model does not end"),
    "more tokens": (changed(more), "H116", "9 tokens where 8 were asked for"),
    "another token": (changed(replaced), "H048", "token 0 is 77, expected"),
    "an unknown end": (changed(cut_short), "H116", "finish_reason 'abort'"),
    "a hang-up": (hang_up, "H114", "ended in the middle of an answer"),
}


def check(plan, url, **options):
    options = {"retries": 1, "timeout_s": 0.3 if "timeout_s" not in options else options.pop("timeout_s"), **options}
    return check_endpoint(plan, Address(url=url, **options), num_again=0)


def only_finding(result, schedule):
    """Return the finding of a schedule; no other one has any."""
    findings = {run.schedule: run.findings for run in result.runs}
    (finding,) = findings.pop(schedule)
    assert not any(findings.values())
    return finding


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_answer_is_named_and_the_others_are_judged(plan, server, name):
    app, url = server
    app.spoil, code, says = BAD[name]
    result = check(plan, url, timeout_s=5.0 if name == "silence" else 600.0)
    (run,) = result.runs
    assert app.num_spoilt
    assert result.outcome is Outcome.MISMATCH
    assert {finding.request for finding in run.findings} == {2}
    assert any(finding.code == code and says in finding.message for finding in run.findings), run.findings
    assert run.tokens.compared >= 3 * 8


@pytest.mark.parametrize(("name", "num_requests"), [("429", 2), ("500", 2), ("a hang-up", 2), ("HTML", 1)])
def test_what_may_pass_is_tried_again(plan, server, name, num_requests):
    app, url = server
    app.spoil = BAD[name][0]
    result = check(plan, url, timeout_s=600.0)
    assert app.num_spoilt == num_requests
    assert any("sent again" in note for note in result.notes) == (num_requests > 1)


def test_a_server_that_is_busy_once_is_sound(plan, server):
    app, url = server

    async def once(app_, scope, receive, send, body):
        await (reply(send, b"busy", status=503) if app.num_spoilt == 1 else app_(scope, receive, send))

    app.spoil = once
    assert check(plan, url, timeout_s=600.0).outcome is Outcome.PASS


def test_a_server_that_is_not_there(plan):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(HarnessError, match="H110: the server cannot be reached") as caught:
        check(plan, f"http://127.0.0.1:{port}")
    assert caught.value.exit_status == 2


def test_a_server_that_never_says_a_word(plan):
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(HarnessError, match="H113") as caught:
        check(plan, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "--request-timeout" in str(caught.value)


def test_another_prompt_in_the_echo(plan, server):
    app, url = server

    def begin_twice(answer):
        logprobs = answer["choices"][0]["logprobs"]
        if logprobs and logprobs["token_logprobs"][0] is None:
            logprobs["tokens"].insert(0, "token_id:1")
            logprobs["token_logprobs"].insert(1, -1.0)
            logprobs["top_logprobs"].insert(1, {})

    app.spoil = changed(begin_twice)
    result = check_endpoint(plan, Address(url=url), num_again=4)
    finding = only_finding(result, "prompt")
    assert (finding.code, finding.request) == ("H116", 2)
    assert "the echo of the prompt has other tokens than were sent" in finding.message


def text_alone(change):
    """Refuse token ids, and change the JSON of the answer to a text."""

    async def spoil(app_, scope, receive, send, body):
        if isinstance(body["prompt"], str):
            await changed(change)(app_, scope, receive, send, body)
        else:
            await reply(send, b'{"error": {"message": "text alone"}}', status=400)

    return spoil


def test_a_tokenizer_that_disagrees_is_told_by_the_number_of_tokens(plan, server):
    app, url = server
    app.spoil, app.spoils_all = text_alone(lambda answer: answer["usage"].update(prompt_tokens=9)), True
    with pytest.raises(HarnessError, match="H115: the server makes other tokens of the prompt's text") as caught:
        check(plan, url, timeout_s=600.0)
    assert "9 tokens" in str(caught.value)
    assert "give --model the checkpoint that is served" in str(caught.value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("end", ["[DONE] is missing", "the connection is lost", "an error"])
def test_a_stream_that_hangs_up(plan, server, end):
    app, url = server

    async def hang_up(_app, _scope, _receive, send, _body):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"transfer-encoding", b"chunked")]})
        event = b'data: {"choices": [{"index": 0, "text": " a", "token_ids": [5]}]}\n\n'
        if end == "an error":
            event = b'data: {"error": {"message": "worker died"}}\n\n'
        await send({"type": "http.response.body", "body": event, "more_body": True})
        if end == "the connection is lost":
            raise ConnectionResetError
        await send({"type": "http.response.body", "body": b""})

    app.spoil = streams_alone(hang_up)
    result = check_endpoint(plan, Address(url=url, retries=0), num_again=4)
    finding = only_finding(result, "streamed")
    assert (finding.code, finding.request) == ("H111" if end == "an error" else "H114", 2)
    assert end != "an error" or "worker died" in finding.message


def test_a_server_that_never_ends_its_streams_is_not_asked_for_them(plan, server):
    """As transformers' own server does: the probe goes on, and says it."""
    app, url = server

    async def never_end(_app, _scope, _receive, send, _body):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'data: {"choices": [{"index": 0, "text": " a"}]}\n\n'})

    app.spoil, app.spoils_all = streams_alone(never_end), True
    result = check_endpoint(plan, Address(url=url, retries=0), num_again=1)
    (streaming,) = [capability for capability in result.capabilities if capability.name == "streaming"]
    assert not streaming.is_there
    assert "without [DONE]" in streaming.detail
    assert "streamed" not in [run.schedule for run in result.runs]


def endless(part, pause_s):
    """Send a part of a body again and again."""

    async def spoil(_app, _scope, _receive, send, _body):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(pause_s)

    return spoil


EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("part", "pause_s", "code", "says"),
    [
        (b" ", 0.05, "H113", "the answer has not ended after 6 s"),
        (b" " * 100_000, 0, "H112", "the answer is longer than 1 MiB"),
    ],
)
def test_an_answer_without_end_is_left(plan, server, monkeypatch, part, pause_s, code, says):
    app, url = server
    monkeypatch.setattr(client, "_MAX_BYTES", 1 << 20)
    monkeypatch.setattr(client, "_ANSWER_TIMEOUTS", 0.2)
    app.spoil = endless(part, pause_s)
    (run,) = check(plan, url, timeout_s=30.0, retries=0).runs
    assert [(finding.code, finding.request) for finding in run.findings] == [(code, 2)]
    assert says in run.findings[0].message


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("part", "pause_s", "limit", "code", "says"),
    [
        (EVENT, 0.05, {}, "H113", "the answer has not ended after 6 s"),
        (EVENT * 100, 0, {"_MAX_EVENTS": 1000}, "H112", "the stream has more than 1,000 events"),
        (EVENT * 1000, 0, {"_MAX_BYTES": 1 << 20}, "H112", "the answer is longer than 1 MiB"),
        (b"data: " + b"a" * 100_000, 0, {"_MAX_BYTES": 1 << 20}, "H112", "the answer is longer than 1 MiB"),
    ],
)
def test_a_stream_without_end_is_left(plan, server, monkeypatch, part, pause_s, limit, code, says):
    app, url = server
    for name, value in {"_ANSWER_TIMEOUTS": 0.2, **limit}.items():
        monkeypatch.setattr(client, name, value)
    app.spoil = streams_alone(endless(part, pause_s))
    result = check_endpoint(plan, Address(url=url, retries=0, timeout_s=30.0), num_again=4)
    (finding,) = next(run.findings for run in result.runs if run.schedule == "streamed")
    assert (finding.code, finding.request) == (code, 2)
    assert says in finding.message


def test_an_answer_that_is_nested_without_measure(plan, server):
    app, url = server
    app.spoil = refused(200, b'{"choices": ' + b"[" * 5000 + b"]" * 5000 + b"}")
    (run,) = check(plan, url, timeout_s=30.0).runs
    assert [(finding.code, finding.request) for finding in run.findings] == [("H112", 2)]


def test_the_key_is_sent_and_never_shown(plan, folder, monkeypatch):
    async def guarded(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        key = dict(scope["headers"]).get(b"authorization", b"none")
        await reply(send, b'{"error": "not you: ' + key + b'"}', status=401)

    with serving(guarded) as url:
        monkeypatch.delenv(API_KEY, raising=False)
        with pytest.raises(HarnessError, match="not you: none") as caught:
            check(plan, url, timeout_s=600.0)
        assert caught.value.code is Code.ENDPOINT_REFUSED
        assert API_KEY in str(caught.value)
        monkeypatch.setenv(API_KEY, "sesame-1234")
        with pytest.raises(HarnessError, match=r"not you: Bearer \[key\]") as caught:
            check(plan, url, timeout_s=600.0)
        assert "sesame" not in str(caught.value)


def test_the_servers_words_are_cut_and_escaped(plan):
    async def babbling(scope, receive, send):
        if scope["type"] == "http":
            await reply(send, b"\x1b[31m" + b"x" * 10_000 + b"\nsecond line", status=400)

    with serving(babbling) as url, pytest.raises(HarnessError) as caught:
        check(plan, url, timeout_s=600.0)
    assert "\x1b" not in str(caught.value)
    assert "second line" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://me:swordfish@host"])
def test_an_address_that_is_none(url):
    with pytest.raises(HarnessError, match="H013") as caught:
        Address(url=url)
    assert "swordfish" not in str(caught.value)


def test_a_victim_is_among_the_prompts(plan):
    assert plan.prompts[2].token_ids == tuple(VICTIM)
