"""Limits of one request: the size of its body, and the time in which the body comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["RequestLimits"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES = 8 << 20
"""Largest body: a million token ids."""
BODY_S = 30.0
"""Longest time from a request's headers to the end of its body."""


class RequestLimits:
    """An ASGI application around another one, which gets whole bodies only."""

    def __init__(self, app: Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Read the body, refuse one that is too large, comes too slowly or is no text, and pass the others on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_S):
                body = await _body(scope, receive)
        except TimeoutError:
            await _refuse(send, 408, f"the body did not come within {BODY_S:g} s")
            return
        if body is None:
            await _refuse(send, 413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")
            return
        left = [body]

        async def again() -> Message:
            return {"type": "http.request", "body": left.pop()} if left else await receive()

        await self._app(scope, again, send)


async def _body(scope: MutableMapping[str, Any], receive: Receive) -> bytes | None:
    """Return the body, or None if it is too large: the rest is not read then."""
    stated = dict(scope["headers"]).get(b"content-length", b"0")
    if not stated.isdigit() or int(stated[:20]) > MAX_BODY_BYTES:
        return None
    content = bytearray()
    while len(content) <= MAX_BODY_BYTES:
        message = await receive()
        content += message.get("body", b"")
        if not message.get("more_body"):  # a client that has gone sends no more either
            return bytes(content) if len(content) <= MAX_BODY_BYTES else None
    return None


async def _refuse(send: Send, status: int, what: str) -> None:
    """Answer with an error, and close the connection: the rest of the body would be taken for a request."""
    error = {"error": {"message": what, "type": "BadRequestError", "param": None, "code": status}}
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error).encode()})
