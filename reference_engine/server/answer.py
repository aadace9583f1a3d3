"""Parts that all answers share: their head, their counts, and several streams as one."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from reference_engine.server.choice import ContinuationPiece

__all__ = ["Answer", "merged", "usage"]


@dataclass(slots=True)
class Answer:
    """The head of an answer, or of all events of a stream."""

    object: str
    prefix: str
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self) -> dict[str, Any]:
        """Return the fields that are not about a choice."""
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": self.object,
            "created": self.created,
            "model": self.model,
        }


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    """Return the counts of tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }


async def merged(sources: Sequence[AsyncGenerator[ContinuationPiece]]) -> AsyncGenerator[tuple[int, ContinuationPiece]]:
    """Yield the pieces of several continuations as they come, each with the number of its continuation."""
    ready: asyncio.Queue[tuple[int, ContinuationPiece] | None] = asyncio.Queue()

    async def forward(at: int, source: AsyncGenerator[ContinuationPiece]) -> None:
        async with aclosing(source) as pieces:
            async for piece in pieces:
                ready.put_nowait((at, piece))

    async def forward_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for at, source in enumerate(sources):
                    group.create_task(forward(at, source))
        finally:
            ready.put_nowait(None)

    task = asyncio.create_task(forward_all())
    try:
        while (item := await ready.get()) is not None:
            yield item
        await task
    finally:
        task.cancel()
