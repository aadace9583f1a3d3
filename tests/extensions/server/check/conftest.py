"""A sound server of the reference engine, and one whose answers a test spoils."""

import copy
import json
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from harness.formats.case import RequestSpec
from harness.plan import Plan, plan_request

from ..served import serve

PROMPTS = [[1, 64, 155, 143, 3, 64], [1, 20, 31, 7, 9], [1, 5, 6, 200, 201, 202, 3, 5], [1, 99, 98, 97]]
VICTIM = PROMPTS[2]
"""The prompt whose answers are spoilt."""


class Spoiling:
    """An ASGI application before another one: what it says to the victim is up to the test."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.spoil: Callable[..., Any] | None = None
        self.spoils_all = False
        """Whether every prompt is a victim."""
        self.num_spoilt = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or self.spoil is None or scope["path"] != "/v1/completions":
            await self.app(scope, receive, send)
            return
        message = await receive()
        body = json.loads(message["body"])

        async def again() -> Any:
            nonlocal message
            first, message = message, None
            return first if first is not None else await receive()

        if self.spoils_all or body["prompt"][: len(VICTIM)] == VICTIM:
            self.num_spoilt += 1
            await self.spoil(self.app, scope, again, send, body)
        else:
            await self.app(scope, again, send)


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Spoil the sound answer: `change` gets its JSON, and edits or replaces it."""

    async def spoil(app: Any, scope: Any, receive: Any, send: Any, body: dict[str, Any]) -> None:
        if body.get("stream"):
            await app(scope, receive, send)
            return
        parts = []

        async def keep(message: Any) -> None:
            parts.append(message)

        await app(scope, receive, keep)
        answer = json.loads(b"".join(part.get("body", b"") for part in parts))
        spoilt = change(answer)
        await reply(send, json.dumps(answer if spoilt is None else spoilt).encode())

    return spoil


def changed_events(change: Callable[[dict[str, Any], int], Awaitable[None]]) -> Callable[..., Any]:
    """Spoil a stream: `change` gets the choice of each event, and the event's number."""

    async def spoil(app: Any, scope: Any, receive: Any, send: Any, _body: Any) -> None:
        numbers = count()

        async def spoilt(message: Any) -> None:
            lines = message.get("body", b"").decode().split("\n\n")
            for at, line in enumerate(lines):
                if line.startswith("data: {") and '"choices": [{' in line:
                    event = json.loads(line.removeprefix("data: "))
                    await change(event["choices"][0], next(numbers))
                    lines[at] = f"data: {json.dumps(event)}"
            await send({**message, **({"body": "\n\n".join(lines).encode()} if "body" in message else {})})

        await app(scope, receive, spoilt)

    return spoil


def asked_otherwise(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., Any]:
    """Change the body of each request before the server sees it."""

    async def spoil(inner: Any, scope: Any, receive: Any, send: Any, body: dict[str, Any]) -> None:
        message = await receive()
        left = [{**message, "body": json.dumps(change(copy.deepcopy(body))).encode()}]

        async def again() -> Any:
            return left.pop() if left else await receive()

        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        await inner({**scope, "headers": headers}, again, send)

    return spoil


def streams_alone(spoil: Callable[..., Any]) -> Callable[..., Any]:
    """Leave answers alone that are no streams."""

    async def spoil_streams(app: Any, scope: Any, receive: Any, send: Any, body: dict[str, Any]) -> None:
        await (spoil(app, scope, receive, send, body) if body.get("stream") else app(scope, receive, send))

    return spoil_streams


async def reply(send: Any, body: bytes, *, status: int = 200, headers: tuple[Any, ...] = (), claims: int = 0) -> None:
    """Answer with a body; `claims` more bytes are promised than sent."""
    standard = [(b"content-type", b"application/json"), (b"content-length", str(len(body) + claims).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*standard, *headers]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="session")
def folder(checkpoints: Path) -> Path:
    return checkpoints / "qwen3-tiny"


@pytest.fixture(scope="session")
def spoiling(folder: Path) -> Iterator[tuple[Spoiling, str]]:
    with serve(folder, wrap=Spoiling, max_num_seqs=16, enable_prefix_caching=True) as server:
        yield server.app, server.url


@pytest.fixture
def server(spoiling: tuple[Spoiling, str]) -> Iterator[tuple[Spoiling, str]]:
    """The server, sound until a test sets `spoil`."""
    app, url = spoiling
    yield app, url
    app.spoil, app.spoils_all, app.num_spoilt = None, False, 0


@pytest.fixture(scope="session")
def plan(folder: Path) -> Plan:
    return make_plan(folder)


def make_plan(
    folder: Path, *, dtype: str = "float32", prompts: Any = PROMPTS, max_new_tokens: int = 8, explain_s: float = 0
) -> Plan:
    """Return the plan of a check of a server; causes take seconds, and are looked for if a test asks for it."""
    requests = [RequestSpec(token_ids=ids) for ids in prompts]
    return plan_request(
        model=str(folder), dtype=dtype, requests=requests, max_new_tokens=max_new_tokens, explain_s=explain_s
    )
