"""A load on a sound server, and on servers that are wrong, late or full in one way each."""

import asyncio
import json

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from harness.errors import Code, HarnessError
from harness.extensions.server.address import Address
from harness.extensions.server.load.command import LOAD
from harness.extensions.server.load.report import load_text
from harness.extensions.server.load.run import LoadOptions, run_load
from harness.judge.jobs.opened import planned_model
from harness.oracle.request_file import LoadRequest
from harness.oracle.requests import Prompt
from harness.report.document import document as result_document
from harness.results.check import Outcome

from ..check.conftest import PROMPTS, VICTIM, changed_events, reply


@pytest.fixture(scope="module")
def hf(plan):
    return planned_model(plan)


@pytest.fixture
def load(plan, hf, server):
    """Send each prompt at 10 ms after the one before it."""

    def call(**options):
        requests = [
            LoadRequest(at_s=0.01 * at, prompt=Prompt(token_ids=tuple(ids), max_new_tokens=8))
            for at, ids in enumerate(PROMPTS)
        ]
        options = LoadOptions(**{"arrivals": "100 a second", "limits_ms": {}, **options})
        return run_load(plan, hf, Address(url=server[1], concurrency=8), requests, options)

    return call


def test_a_sound_server(load, capsys):
    result = load()
    assert result.outcome is Outcome.PASS
    assert (result.num_answered, result.num_judged, result.num_good) == (4, 4, 4)
    assert result.answers.tokens.compared == result.num_new_tokens > 0
    assert result.num_prompt_tokens == sum(map(len, PROMPTS))
    assert result.times_ms["ttft"].p50 <= result.times_ms["e2e"].p50
    assert result.times_ms["itl"].num_values == result.num_new_tokens - 4
    assert "PASS  reference_engine at http://127.0.0.1" in load_text(result, width=100)
    LOAD.show(result, "markdown")
    assert capsys.readouterr().out.startswith("```")
    document = result_document(result)
    assert (document["verdict"], document["good_share"]) == ("pass", 1)
    json.dumps(document, allow_nan=False)


def test_some_answers_are_judged_and_the_rest_is_said(load):
    result = load(num_judged=2)
    assert (result.outcome, result.num_judged, result.num_answered) == (Outcome.PASS, 2, 4)
    assert "2 of 4 answers were checked against HF's truth" in result.notes


def streamed(change):
    """Spoil the victim's stream: `change` gets each event's choice and its number."""

    wrong = changed_events(change)

    async def spoil(app, scope, receive, send, body):
        await (wrong(app, scope, receive, send, body) if body["max_tokens"] == 8 else app(scope, receive, send))

    return spoil


def test_a_wrong_token_under_load_is_found_and_is_not_good(load, server):
    async def other_token(choice, number):
        if number == 2:
            choice["token_ids"] = [(token + 1) % 200 for token in choice["token_ids"]]

    server[0].spoil = streamed(other_token)
    result = load()
    assert result.outcome is Outcome.MISMATCH
    assert {finding.request for finding in result.answers.findings} == {PROMPTS.index(VICTIM)}
    assert result.answers.findings[0].code is Code.TOKENS_DIFFER
    assert (result.num_answered, result.num_good) == (4, 3)
    assert "its logit is" in load_text(result, width=120)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "number", "seconds"), [("ttft", 0, 1.0), ("e2e", 3, 1.0), ("tpot", 1, 3.0)])
def test_a_late_answer_misses_its_limit(load, server, name, number, seconds):
    async def late(_choice, at):
        if at == number:
            await asyncio.sleep(seconds)

    server[0].spoil = streamed(late)
    limit = 1e3 * seconds * (1 / 8 if name == "tpot" else 0.9)  # the pause is shared by the seven later tokens
    result = load(limits_ms={name: limit})
    assert result.outcome is Outcome.PASS
    assert result.num_good < 4
    assert result.times_ms[name].max >= limit


def test_an_answer_in_one_part_has_no_time_of_later_tokens(load, server):
    held = {"token_ids": [], "text": ""}

    async def at_once(choice, number):
        held["token_ids"] += choice["token_ids"]
        held["text"] += choice["text"]
        choice.update(held if number == 7 else {"token_ids": [], "text": ""})

    server[0].spoil = streamed(at_once)
    result = load()
    assert result.outcome is Outcome.PASS
    assert {name: result.times_ms[name].num_values for name in ("ttft", "tpot")} == {"ttft": 4, "tpot": 3}


def test_who_is_turned_away_is_counted_and_is_no_finding(load, server):
    async def full(_app, scope, receive, send, body):
        await reply(send, b'{"error": "full"}', status=503)

    server[0].spoil = full
    result = load()
    assert (result.outcome, result.num_turned_away, result.num_answered) == (Outcome.PASS, 1, 3)
    assert result.good_share == 0.75
    assert "1 turned away (429 or 503)" in load_text(result, width=100)


def test_a_failure_is_a_finding(load, server):
    async def breaks(_app, scope, receive, send, body):
        await reply(send, b'{"error": "broken"}', status=500)

    server[0].spoil = breaks
    result = load()
    assert result.outcome is Outcome.MISMATCH
    assert result.answers.findings[0].message.startswith("the server answers with status 500")


def test_a_server_that_answers_nobody_is_an_error(load, server):
    async def full(app, scope, receive, send, body):
        if body["max_tokens"] == 8:
            await reply(send, b"{}", status=503)
        else:
            await app(scope, receive, send)

    server[0].spoil, server[0].spoils_all = full, True
    with pytest.raises(HarnessError, match="the server answers with status 503"):
        load()


def test_a_server_that_cannot_stream_is_refused(load, server):
    async def whole(app, scope, receive, send, body):
        if body.get("stream"):
            await reply(send, b'{"error": "no streams"}', status=400)
        else:
            await app(scope, receive, send)

    server[0].spoil, server[0].spoils_all = whole, True
    with pytest.raises(HarnessError, match="the server does not stream") as caught:
        load()
    assert caught.value.code is Code.ENDPOINT_CANNOT


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_sent(plan, hf, server):
    requests = [LoadRequest(at_s=0.0, prompt=Prompt(token_ids=(1,) * 600, max_new_tokens=8))]
    with pytest.raises(HarnessError, match="longer than the model allows"):
        run_load(plan, hf, Address(url=server[1]), requests, LoadOptions(arrivals="", limits_ms={}))
