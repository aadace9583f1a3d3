"""Servers that refuse, fail or answer nonsense where draws are asked for: said, and never a pass."""

import json

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from harness.campaigns.endpoint.address import Address
from harness.campaigns.sampler.run import check_sampler
from harness.results.check import Outcome
from reference_engine import EngineConfig, LLMEngine
from reference_engine.server.app import build_app
from reference_engine.server.text import Text

from ....loopback import serving
from .conftest import FOLDER, plan_of


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

        if body.get("temperature") != 1.5:
            await self.app(scope, again, send)
            return
        status, own = self.answer
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(own)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": own})


@pytest.fixture(scope="module")
def spoilt():
    with LLMEngine(FOLDER, EngineConfig(dtype="float32")) as engine:
        app = HotSpoilt(build_app(engine, Text(FOLDER), model="tiny"))
        with serving(app) as url:
            yield app, Address(url=url, retries=0, timeout_s=600)


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
    result = check_sampler(plan_of(), address, num_draws=10, only=["hot", "cold"])
    assert result.outcome is outcome
    cold, hot = result.settings
    assert (cold.name, cold.num_draws, hot.num_draws) == ("cold", 10, 0)
    said = hot.not_judged or "; ".join(finding.message for finding in hot.findings)
    assert says in said
    assert ("hot" in result.not_judged) == (outcome is Outcome.PASS)
