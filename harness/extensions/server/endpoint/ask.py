"""All that a server is asked: the probe, the prompts together, some of them again in other ways."""

import asyncio
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from harness.base.progress import Progress
from harness.extensions.server.endpoint.address import Address
from harness.extensions.server.endpoint.answer import Completion
from harness.extensions.server.endpoint.client import Client
from harness.extensions.server.endpoint.names import TokenNames
from harness.extensions.server.endpoint.probe import probe
from harness.extensions.server.endpoint.probed import Probed
from harness.extensions.server.endpoint.schedules import ScheduledRequests, Sender, Sent, Way, continued
from harness.extensions.server.endpoint.truth import Walk
from harness.extensions.server.endpoint.walks import walk_of
from harness.oracle.requests import Prompt
from harness.plan import Plan

BLOCK_PROMPTS = 16
"""Prompts whose truth is run as one batch. Which ones they are does not depend on who is answered first: HF's own
rounding, by which answers are judged, may differ from batch to batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The requests to a server, and its answers."""

    probed: Probed
    names: TokenNames
    runs: tuple[ScheduledRequests, ...]
    """The first is of all prompts together."""
    num_retries: int
    waited_s: float


async def ask(
    plan: Plan,
    address: Address,
    num_again: int,
    *,
    eos: Set[int],
    vocab_size: int,
    add_walks: Callable[[dict[int, Walk]], None],
    progress: Progress,
) -> Asked:
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
            sender=Sender(client=client, dialect=probed.dialect, names=names),
            prompts=list(enumerate(plan.prompts)),
            num_again=min(num_again, len(plan.prompts)),
            ways=tuple(_other_ways(probed)),
            blocks=blocks,
            progress=progress,
        )
        runs = await requests.send()
        blocks.add(range(requests.num_again), [sent for run in runs for sent in run.sent])
        return Asked(probed=probed, names=names, runs=runs, num_retries=client.num_retries, waited_s=client.waited_s)


def _other_ways(probed: Probed) -> Iterator[Way]:
    """Yield the ways, beside the first, that the server can be asked in."""
    yield from (Way.REPEATED, Way.ALONE, Way.REVERSED)
    if probed.dialect.takes_token_ids:
        yield Way.CONTINUED
    if probed.has("streaming"):
        yield Way.STREAMED
    if probed.has("prompt logprobs"):
        yield Way.PROMPT


@dataclass(slots=True, kw_only=True)
class _Requests:
    """All prompts together; after them, in the same queue, some of them again; at last these alone."""

    sender: Sender
    prompts: list[tuple[int, Prompt]]
    num_again: int
    ways: tuple[Way, ...]
    blocks: "_Blocks"
    progress: Progress
    _firsts: list[Sent] = field(default_factory=list)
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
                way: group.create_task(self.sender.send(way, own, on_sent=self._is_done))
                for way, own in asked.items()
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
            self._firsts.append(sent)
            if len(self._firsts) == self.num_again:
                self._are_firsts_done.set()

    def _is_done(self, _sent: Sent) -> None:
        self._num_done += 1
        self.progress("server", self._num_done, len(self.prompts) + len(self.ways) * self.num_again)

    def _asked_again(self) -> dict[Way, list[tuple[int, Prompt]]]:
        """Return the prompts of the other ways; none if the server answered none of those that are sent again."""
        again, asked = self.prompts[: self.num_again], dict[Way, list[tuple[int, Prompt]]]()
        answers = {sent.request: sent.result for sent in self._firsts if isinstance(sent.result, Completion)}
        for way in self.ways if answers else ():
            asked[way] = again
            if way is Way.CONTINUED:
                asked[way] = continued(again, answers)
            elif way is Way.PROMPT:
                asked[way] = [(number, Prompt(token_ids=own.token_ids, max_new_tokens=1)) for number, own in again]
        return {way: own for way, own in asked.items() if own}


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
        walks = {
            number: walk_of(
                self.prompts[number],
                [sent for sent in all_sent if sent.request == number],
                eos=self.eos,
                num_top=self.num_top,
            )
            for number in numbers
        }
        found = {number: walk for number, walk in walks.items() if walk is not None}
        if found:
            self.add_walks(found)
