"""Sends requests when they are due, streamed, and keeps when each part of an answer came."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import HarnessError
from harness.extensions.server.endpoint.answer import Completion
from harness.extensions.server.endpoint.client import Client
from harness.extensions.server.endpoint.dialect import COMPLETIONS, Dialect
from harness.extensions.server.endpoint.names import TokenNames
from harness.extensions.server.endpoint.parse import only_choice, read_answer
from harness.extensions.server.endpoint.schedules import Sent, joined
from harness.oracle.request_file import LoadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """One request, what came of it, and when; times are in seconds after the first request was due."""

    sent: Sent
    due_s: float
    sent_s: float
    part_s: tuple[float, ...]
    """When each part with new tokens came; empty for a request that failed."""
    end_s: float

    @property
    def is_answered(self) -> bool:
        """Whether there is a whole answer."""
        return isinstance(self.sent.result, Completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSender:
    """Sends the requests of a load to a server whose dialect is known."""

    client: Client
    dialect: Dialect
    names: TokenNames
    on_done: Callable[[], None]

    async def send(self, requests: Sequence[LoadRequest]) -> list[TimedAnswer]:
        """Send each request when it is due, and return the answers in the order of the requests."""
        bodies = [self._body(request) for request in requests]  # made before the clock runs
        begin = time.perf_counter()

        async def one(number: int) -> TimedAnswer:
            await asyncio.sleep(max(0.0, begin + requests[number].at_s - time.perf_counter()))
            answer = await self._ask(number, requests[number], bodies[number], begin)
            self.on_done()
            return answer

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(len(requests))]
        return [task.result() for task in tasks]

    def _body(self, request: LoadRequest) -> dict[str, Any]:
        return self.dialect.body(request.prompt.token_ids, request.prompt.max_new_tokens, self.names)

    async def _ask(self, number: int, request: LoadRequest, body: dict[str, Any], begin: float) -> TimedAnswer:
        sent_s, prompt = time.perf_counter() - begin, request.prompt
        parts: tuple[float, ...] = ()
        result: Completion | HarnessError
        try:
            events = await self.client.timed_stream(COMPLETIONS, body)
            end_s = time.perf_counter() - begin
            parts = tuple(at - begin for at, event in events if _has_tokens(event))
            answer = joined([event for _, event in events])
            result = read_answer(answer, prompt.token_ids, self.names, where=COMPLETIONS, seconds=end_s - sent_s)
        except HarnessError as error:
            result, end_s = error, time.perf_counter() - begin
        sent = Sent(request=number, prompt=prompt.token_ids, max_tokens=prompt.max_new_tokens, result=result)
        return TimedAnswer(sent=sent, due_s=request.at_s, sent_s=sent_s, part_s=parts, end_s=end_s)


def _has_tokens(event: Any) -> bool:
    if isinstance(event, dict) and event.get("choices") == []:
        return False
    part = only_choice(event, where=COMPLETIONS)
    return bool(part.get("text") or part.get("token_ids"))
