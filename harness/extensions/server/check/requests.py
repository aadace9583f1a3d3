"""What a server is sent: the probe, all prompts together, and some of them again in other ways."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from harness.base.progress import Progress
from harness.errors import HarnessError
from harness.extensions.server.address import Address
from harness.extensions.server.client import Client
from harness.extensions.server.completion import (
    COMPLETIONS,
    Completion,
    Dialect,
    choices_of,
    join_events,
    read_answer,
    read_text_answer,
)
from harness.extensions.server.names import TokenNames
from harness.extensions.server.probe import NUM_SEVERAL, SEVERAL, Probed, probe
from harness.extensions.server.truth import Walk
from harness.oracle.requests import Prompt
from harness.plan import Plan

BLOCK_PROMPTS = 16
"""Prompts whose truth is run as one batch. Which ones they are does not depend on who is answered first: HF's own
rounding, by which answers are judged, may differ from batch to batch."""


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
    PLAIN = "plain"
    """Without a field that asks for log probabilities or ids of tokens, as clients do; every second one is a stream."""
    TEXT = "text"
    """The same, with the prompt's text in the place of its tokens."""
    SEVERAL = "several"
    """With n=2: two answers to each prompt."""


_OF_TEXT = (Way.PLAIN, Way.TEXT)
"""Ways in which the answer is a text, and names no tokens."""


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
    streams: bool = False
    """Whether every second request without log probabilities is a stream."""
    firsts: dict[int, Completion] = field(default_factory=dict)
    """First answers to the prompts that are sent again."""

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
            results.extend(await self._ask(way, number, prompt))
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

    async def _ask(self, way: Way, number: int, prompt: Prompt) -> list[Sent]:
        ids, max_tokens = prompt.token_ids, prompt.max_new_tokens
        results: list[Completion | HarnessError]
        try:
            dialect = self.dialect.plain(as_text=way is Way.TEXT) if way in _OF_TEXT else self.dialect
            body = dialect.body(ids, max_tokens, self.names, with_prompt=way is Way.PROMPT)
            if way is Way.STREAMED or (way is Way.PLAIN and self.streams and number % 2):
                answers = [join_events(await self.client.stream(COMPLETIONS, body))]
            elif way is Way.SEVERAL:
                answers = choices_of(await self.client.post(COMPLETIONS, body | {"n": NUM_SEVERAL}), NUM_SEVERAL)
            else:
                answers = [await self.client.post(COMPLETIONS, body)]
            if way in _OF_TEXT:
                results = [read_text_answer(answers[0], ids, self.names, self.firsts.get(number), where=COMPLETIONS)]
            else:
                is_echoed = bool(body.get("echo"))
                results = [
                    read_answer(item, ids, self.names, where=COMPLETIONS, is_echoed=is_echoed) for item in answers
                ]
        except HarnessError as error:
            results = [error]
        return [Sent(request=number, prompt=ids, max_tokens=max_tokens, result=result) for result in results]


def continue_prompts(
    prompts: Iterable[tuple[int, Prompt]], answers: Mapping[int, Completion]
) -> list[tuple[int, Prompt]]:
    """Return numbered prompts that begin in the middle of their answers; short answers are left out."""
    from_the_middle = []
    for number, prompt in prompts:
        half = answers[number].token_ids[: len(answers[number].token_ids) // 2] if number in answers else ()
        if half:
            ids, num_left = (*prompt.token_ids, *half), prompt.max_new_tokens - len(half)
            from_the_middle.append((number, replace(prompt, token_ids=ids, max_new_tokens=num_left)))
    return from_the_middle


def walk_of(prompt: Prompt, all_sent: Sequence[Sent], *, eos: Set[int], num_top: int) -> Walk | None:
    """Return the walk of one prompt.

    The first of `all_sent` is of the first run, whose answer the truth goes along; the server gives `num_top` likeliest
    tokens.

    Returns:
        None if the first request failed: there is nothing to go along.
    """
    first = all_sent[0].result
    if not isinstance(first, Completion):
        return None
    ids = (*prompt.token_ids, *first.token_ids)
    wanted: dict[int, set[int]] = {}
    for sent in all_sent:
        if isinstance(sent.result, Completion):
            _want(wanted, ids, sent.prompt, sent.result)
    if first.finish_reason == "stop":
        wanted.setdefault(len(ids) - 1, set()).update(eos)
    return Walk(
        token_ids=ids,
        wanted={position: frozenset(token_ids) for position, token_ids in sorted(wanted.items())},
        num_top=1 + num_top,
    )


def _want(wanted: dict[int, set[int]], walk: Sequence[int], prompt: Sequence[int], answer: Completion) -> None:
    """Add the tokens whose probability is asked for, as far as an answer goes along the walk."""
    for at, token_id in enumerate(answer.token_ids):
        position = len(prompt) + at
        wanted.setdefault(position - 1, set()).update([token_id], answer.logprobs_at(at) or ())
        if position >= len(walk) or walk[position] != token_id:
            break
    for position, logprobs in enumerate(answer.prompt_logprobs or ()):
        if position:
            wanted.setdefault(position - 1, set()).update(logprobs, [walk[position]])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswers:
    """The requests to a server, and its answers."""

    probed: Probed
    names: TokenNames
    runs: tuple[ScheduledRequests, ...]
    """The first is of all prompts together."""
    client: Client


async def ask(
    plan: Plan,
    address: Address,
    num_again: int,
    *,
    eos: Set[int],
    vocab_size: int,
    add_walks: Callable[[dict[int, Walk]], None],
    progress: Progress,
) -> ServerAnswers:
    """Probe a server, and send all that it can take.

    `num_again` prompts are sent again in other ways. `add_walks` is given the walks of a block of prompts, by number,
    when nothing more is sent of them.
    """
    progress("probe", 0, 1)
    names = TokenNames(plan.checkpoint, vocab_size=vocab_size)
    async with Client(address) as client:
        probed = await probe(client, plan.prompts[0].token_ids, names, fallback_model=plan.case.model)
        blocks = _Blocks(
            prompts=plan.prompts, begin=num_again, eos=eos, num_top=probed.dialect.num_top, add_walks=add_walks
        )
        requests = _Requests(
            sender=Sender(client=client, dialect=probed.dialect, names=names, streams=probed.has("streaming")),
            prompts=list(enumerate(plan.prompts)),
            num_again=min(num_again, len(plan.prompts)),
            ways=tuple(_other_ways(probed, names)),
            blocks=blocks,
            progress=progress,
        )
        runs = await requests.send()
        blocks.add(range(requests.num_again), [sent for run in runs for sent in run.sent])
        return ServerAnswers(probed=probed, names=names, runs=runs, client=client)


def _other_ways(probed: Probed, names: TokenNames) -> Iterator[Way]:
    """Yield the ways, beside the first, that the server can be asked in."""
    yield from (Way.REPEATED, Way.ALONE, Way.REVERSED)
    if probed.dialect.takes_token_ids:
        yield Way.CONTINUED
    if probed.has("streaming"):
        yield Way.STREAMED
    if probed.has("prompt logprobs"):
        yield Way.PROMPT
    if probed.dialect != probed.dialect.plain():
        yield Way.PLAIN
    if probed.dialect.takes_token_ids and names.is_there:
        yield Way.TEXT
    if probed.has(SEVERAL):
        yield Way.SEVERAL


@dataclass(slots=True, kw_only=True)
class _Requests:
    """All prompts together; after them, in the same queue, some of them again; at last these alone."""

    sender: Sender
    prompts: list[tuple[int, Prompt]]
    num_again: int
    ways: tuple[Way, ...]
    blocks: "_Blocks"
    progress: Progress
    _num_firsts: int = 0
    """First requests for the prompts that are sent again, those that are done."""
    _are_firsts_done: asyncio.Event = field(default_factory=asyncio.Event)
    _num_done: int = 0

    async def send(self) -> tuple[ScheduledRequests, ...]:
        """Send all, and return the runs, the first one first."""
        async with asyncio.TaskGroup() as group:
            together = group.create_task(self.sender.send(Way.TOGETHER, self.prompts, on_sent=self._first_is_done))
            if self.num_again:
                await self._are_firsts_done.wait()
            asked = self._asked_again()
            tasks = {
                way: group.create_task(self.sender.send(way, prompts, on_sent=self._is_done))
                for way, prompts in asked.items()
                if way is not Way.ALONE
            }
        runs: dict[Way, ScheduledRequests] = {way: task.result() for way, task in tasks.items()}
        if Way.ALONE in asked:
            runs[Way.ALONE] = await self.sender.send(Way.ALONE, asked[Way.ALONE], on_sent=self._is_done)
        return together.result(), *(runs[way] for way in asked)

    def _first_is_done(self, sent: Sent) -> None:
        self.blocks.take(sent)
        self._is_done(sent)
        if sent.request < self.num_again:
            if isinstance(sent.result, Completion):
                self.sender.firsts[sent.request] = sent.result
            self._num_firsts += 1
            if self._num_firsts == self.num_again:
                self._are_firsts_done.set()

    def _is_done(self, _sent: Sent) -> None:
        self._num_done += 1
        self.progress("server", self._num_done, len(self.prompts) + len(self.ways) * self.num_again)

    def _asked_again(self) -> dict[Way, list[tuple[int, Prompt]]]:
        """Return the prompts of the other ways; none if the server answered none of those that are sent again."""
        again, asked = self.prompts[: self.num_again], dict[Way, list[tuple[int, Prompt]]]()
        answers = self.sender.firsts
        for way in self.ways if answers else ():
            asked[way] = again
            if way is Way.CONTINUED:
                asked[way] = continue_prompts(again, answers)
            elif way is Way.PROMPT:
                asked[way] = [(number, replace(prompt, max_new_tokens=1)) for number, prompt in again]
            elif way is Way.TEXT:
                names = self.sender.names
                asked[way] = [(number, prompt) for number, prompt in again if names.text_of(prompt.token_ids)]
        return {way: prompts for way, prompts in asked.items() if prompts}


@dataclass(slots=True, kw_only=True)
class _Blocks:
    """Gives the walks of prompts that are sent once to the truth, when all of a block are answered."""

    prompts: Sequence[Prompt]
    begin: int
    """Prompts before it are sent again."""
    eos: Set[int]
    num_top: int
    add_walks: Callable[[dict[int, Walk]], None]
    _sent: dict[int, list[Sent]] = field(default_factory=dict)

    def take(self, sent: Sent) -> None:
        """Take a request that is done."""
        if sent.request < self.begin:
            return
        block = (sent.request - self.begin) // BLOCK_PROMPTS
        begin = self.begin + block * BLOCK_PROMPTS
        numbers = range(begin, min(begin + BLOCK_PROMPTS, len(self.prompts)))
        members = self._sent.setdefault(block, [])
        members.append(sent)
        if len(members) == len(numbers):
            self.add(numbers, self._sent.pop(block))

    def add(self, numbers: range, all_sent: Sequence[Sent]) -> None:
        """Give the walks of some prompts to the truth; those that were never answered have none."""
        walks = dict[int, Walk]()
        for number in numbers:
            of_prompt = [sent for sent in all_sent if sent.request == number]
            walk = walk_of(self.prompts[number], of_prompt, eos=self.eos, num_top=self.num_top)
            if walk is not None:
                walks[number] = walk
        if walks:
            self.add_walks(walks)
