"""Connections with deadlines: uvicorn waits for ever for the end of headers, and for a client that does not read."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["MAX_CONNECTIONS", "ImpatientProtocol"]

HEADERS_S = 10.0
"""Longest time that the headers of a request take, from the connection or from their first byte on."""
UNREAD_S = 60.0
"""Longest time in which a client takes nothing of an answer."""
MAX_CONNECTIONS = 512
"""Connections at a time; requests of further ones are refused with status 503."""


class ImpatientProtocol(H11Protocol):  # type: ignore[misc]
    """uvicorn's protocol of HTTP/1.1, which drops connections that are held and not used."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._headers_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._headers_timer = self.loop.call_later(HEADERS_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._drop("_headers_timer")
        elif self._headers_timer is None:
            self._headers_timer = self.loop.call_later(HEADERS_S, self.transport.abort)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        self._drop("_unread_timer")

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(error)
        self._drop("_headers_timer")
        self._drop("_unread_timer")

    def _drop(self, name: str) -> None:
        timer = getattr(self, name)
        if timer is not None:
            timer.cancel()
        setattr(self, name, None)
