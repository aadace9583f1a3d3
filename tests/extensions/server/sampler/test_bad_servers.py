"""Servers that refuse, fail or answer nonsense where draws are asked for: said, and never a pass."""

import json

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from harness.extensions.server.sampler.run import check_sampler
from harness.results.check import Outcome

from ..served import serve
from .conftest import plan_of
from .faults import params


class HotSpoilt:
    """An application before a sound one, which answers otherwise where the temperature is 1.5."""

    def __init__(self, app):
        self.app, self.answer = app, (200, b"{}")

    async def __call__(self, scope, receive, send):
        message = await receive() if scope["type"] == "http" else None
        body = json.loads(message.get("body") or b"{}") if message else {}
        left = [message] if message else []

        async def again():
            return left.pop() if left else await receive()

        answer = self.answer_to(body)
        if answer is None:
            await self.app(scope, again, send)
            return
        status, content = answer
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def answer_to(self, body):
        """Return status and body; None: the sound server answers."""
        return self.answer if body.get("temperature") == 1.5 else None


class TextAlone(HotSpoilt):
    """An application that refuses token ids, as mlx-lm does, and where it draws a `top_k` of -1, as GenAI does."""

    def answer_to(self, body):
        if isinstance(body.get("prompt"), list):
            return 404, b'{"error": "text input must be of type `str`"}'
        is_refused = body.get("top_k", 0) < 0 and body.get("temperature", 1.0) > 0
        return (400, b'{"error": "top_k must be at least 0"}') if is_refused else None


@pytest.fixture(scope="module")
def spoilt():
    with serve(wrap=HotSpoilt) as server:
        yield server.app, server.address(retries=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        ((400, b'{"error": {"message": "too hot"}}'), Outcome.PASS, "the server answers with status 400: too hot"),
        ((500, b"boom"), Outcome.MISMATCH, "the server answers with status 500: boom"),
        ((200, b"<html>"), Outcome.MISMATCH, "the answer is no JSON: <html>"),
        ((200, b'{"choices": [{"token_ids": [99999], "finish_reason": "length"}]}'), Outcome.MISMATCH, "does not have"),
    ],
    ids=["refused", "failed", "HTML", "no token"],
)
def test_a_setting_without_answers_is_not_judged_and_others_are(spoilt, answer, outcome, says):
    app, address = spoilt
    app.answer = answer
    result = check_sampler(plan_of(), address, num_draws=60, only=["hot", "top_k"])
    assert result.outcome is outcome
    hot, top_k = result.settings
    assert (top_k.name, top_k.num_draws, hot.num_draws) == ("top_k", 60, 0)
    said = hot.not_judged or "; ".join(finding.message for finding in hot.findings)
    assert says in said
    assert ("hot" in result.not_judged) == (outcome is Outcome.PASS)


def test_a_server_that_cuts_answers_or_goes_on_is_a_mismatch(spoilt, monkeypatch):
    app, address = spoilt
    monkeypatch.setattr(app, "answer", (200, b'{"choices": [{"token_ids": [5], "finish_reason": "length"}]}'))
    result = check_sampler(plan_of(), address, num_draws=10, only=["hot"])
    assert result.settings[0].findings[0].message == "1 tokens where 10 were asked for, and finish_reason is 'length'"
    long = json.dumps({"choices": [{"token_ids": [5] * 5000, "finish_reason": "length"}]}).encode()
    monkeypatch.setattr(app, "answer", (200, long))
    result = check_sampler(plan_of(), address, num_draws=10, only=["hot"])
    assert result.settings[0].findings[0].message == "5000 tokens where 10 were asked for"
    assert result.num_draws == 10


def test_log_probabilities_that_are_gone_where_tokens_are_drawn(spoilt, monkeypatch):
    app, address = spoilt
    monkeypatch.setattr(
        app, "answer", (200, json.dumps({"choices": [{"token_ids": [5] * 10, "finish_reason": "length"}]}).encode())
    )
    result = check_sampler(plan_of(), address, num_draws=10, only=["hot"])
    assert "10 of 10 tokens have no log probability; the probe's tokens had one" in [
        finding.message for finding in result.findings
    ]


def test_a_step_that_the_order_lacks_is_not_judged(spoilt):
    _, address = spoilt
    only = ["top_p", "repetition_penalty", "presence_penalty", "logit_bias", "top_k"]
    result = check_sampler(plan_of(), address, num_draws=60, only=only, order=("repetition", "temperature", "top_p"))
    assert result.outcome is Outcome.PASS
    assert {name: result.not_judged.get(name) for name in only} == {
        "top_p": None,
        "repetition_penalty": None,
        "presence_penalty": "--order has no step presence",
        "logit_bias": "--order has no step logit_bias",
        "top_k": "--order has no step top_k",
    }


@pytest.mark.slow
def test_defaults_of_the_server_are_a_note_and_no_finding(address, monkeypatch):
    params(repetition_penalty=3.0)(monkeypatch)
    result = check_sampler(plan_of(), address, num_draws=200, only=["defaults"])
    assert result.settings[0].findings == result.findings == ()
    assert result.outcome is Outcome.NOTHING
    defaults, not_asked = result.notes
    assert defaults.startswith("where only a temperature is sent, ")
    assert not_asked.startswith("not asked: answers of more than 10 tokens, ")


@pytest.mark.slow
def test_a_server_of_text_alone_whose_tokenizer_begins_each_text():
    """Its prompts must begin with the same token, or no text becomes them."""
    with serve(wrap=TextAlone) as server:
        result = check_sampler(plan_of(), server.address(), num_draws=60, only=["top_k", "hot"])
    assert result.outcome is Outcome.PASS
    assert [setting.num_draws for setting in result.settings] == [60, 60]
    bodies = [setting.body for setting in result.settings]
    assert [body["top_k"] for body in bodies] == [0, 3]
    assert all(isinstance(body["prompt"], str) for body in bodies)
