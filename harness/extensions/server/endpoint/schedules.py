"""The ways in which prompts are sent: the same ones together, alone, again, in another order, from the middle on."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from harness.errors import HarnessError
from harness.extensions.server.endpoint.answer import Completion
from harness.extensions.server.endpoint.client import Client
from harness.extensions.server.endpoint.dialect import COMPLETIONS, Dialect
from harness.extensions.server.endpoint.names import TokenNames
from harness.extensions.server.endpoint.parse import only_choice, read_answer
from harness.oracle.requests import Prompt


class Way(StrEnum):
    """A way to send requests."""

    TOGETHER = "together"
    """All at once, as far as the concurrency goes: whatever batches there are."""
    ALONE = "alone"
    """One after the other."""
    REPEATED = "repeated"
    """Together a second time: prefixes are in the cache, if there is one."""
    REVERSED = "reversed"
    """Together, the last first: other neighbours in every batch."""
    CONTINUED = "continued"
    """From the middle of the first answer on: what was decoded is prefilled, or found in the cache."""
    STREAMED = "streamed"
    """Token by token."""
    PROMPT = "prompt"
    """With log probabilities of the prompt, for one new token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request, and what came of it."""

    request: int
    """Number of the prompt."""
    prompt: tuple[int, ...]
    """The tokens that were sent."""
    max_tokens: int
    result: Completion | HarnessError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequests:
    """All requests of one way."""

    way: Way
    sent: tuple[Sent, ...]
    seconds: float
    """From the first request to the last answer."""

    @property
    def answers(self) -> dict[int, Completion]:
        """Answers by the number of the prompt, without failures."""
        return {item.request: item.result for item in self.sent if isinstance(item.result, Completion)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Sends prompts to a server whose dialect is known."""

    client: Client
    dialect: Dialect
    names: TokenNames

    async def send(
        self, way: Way, prompts: Iterable[tuple[int, Prompt]], *, on_sent: Callable[[Sent], None]
    ) -> ScheduledRequests:
        """Send numbered prompts in one way. A request that fails keeps no other from its answer.

        `on_sent` is shown every request as soon as it is answered or has failed.
        """
        asked = list(prompts)
        if way is Way.REVERSED:
            asked.reverse()
        begin, results = time.perf_counter(), list[Sent]()

        async def one(number: int, prompt: Prompt) -> None:
            results.append(await self._ask(way, number, prompt))
            on_sent(results[-1])

        if way is Way.ALONE:
            for number, prompt in asked:
                await one(number, prompt)
        else:
            async with asyncio.TaskGroup() as group:
                for number, prompt in asked:
                    group.create_task(one(number, prompt))
        results.sort(key=lambda sent: sent.request)
        return ScheduledRequests(way=way, sent=tuple(results), seconds=time.perf_counter() - begin)

    async def _ask(self, way: Way, number: int, prompt: Prompt) -> Sent:
        result: Completion | HarnessError
        try:
            result = await self._answer(way, prompt)
        except HarnessError as error:
            result = error
        return Sent(request=number, prompt=prompt.token_ids, max_tokens=prompt.max_new_tokens, result=result)

    async def _answer(self, way: Way, prompt: Prompt) -> Completion:
        begin, ids = time.perf_counter(), prompt.token_ids
        body = self.dialect.body(ids, prompt.max_new_tokens, self.names, with_prompt=way is Way.PROMPT)
        if way is Way.STREAMED:
            answer = joined(await self.client.stream(COMPLETIONS, body))
        else:
            answer = await self.client.post(COMPLETIONS, body)
        seconds = time.perf_counter() - begin
        is_echoed = bool(body.get("echo"))
        return read_answer(answer, ids, self.names, where=COMPLETIONS, is_echoed=is_echoed, seconds=seconds)


def joined(events: Sequence[Any]) -> dict[str, Any]:
    """Put the events of a stream together to what the whole answer would have been."""
    choice: dict[str, Any] = {"text": "", "finish_reason": None}
    body: dict[str, Any] = {"choices": [choice]}
    for event in events:
        if isinstance(event, dict) and event.get("usage"):
            body["usage"] = event["usage"]
        if isinstance(event, dict) and event.get("choices") == []:
            continue
        part = only_choice(event, where=COMPLETIONS)
        if isinstance(part.get("text"), str):
            choice["text"] += part["text"]
        choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
        if isinstance(part.get("token_ids"), list):
            _extend(choice, {"token_ids": part["token_ids"]})
        if isinstance(part.get("logprobs"), dict):
            _extend(choice.setdefault("logprobs", {}), part["logprobs"])
    return body


def _extend(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, values in part.items():
        if isinstance(values, list):
            whole[name] = [*whole.get(name, ()), *values]


def continued(prompts: Iterable[tuple[int, Prompt]], answers: Mapping[int, Completion]) -> list[tuple[int, Prompt]]:
    """Return numbered prompts that begin in the middle of their answers; short answers are left out."""
    found = []
    for number, prompt in prompts:
        answer = answers.get(number)
        half = len(answer.token_ids) // 2 if answer is not None else 0
        if answer is not None and half:
            ids = (*prompt.token_ids, *answer.token_ids[:half])
            found.append((number, replace(prompt, token_ids=ids, max_new_tokens=prompt.max_new_tokens - half)))
    return found
