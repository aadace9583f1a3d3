"""The scheduler suite: arrivals, steps, forks, aborts and finishes in any order, held against invariants 19 to 25.

Where the scheduler shows its block tables, the invariants of the blocks are held against it too.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st

from harness.properties.blocks.prefix_cache import CachedBlocks
from harness.properties.blocks.tables import Request, Tables
from harness.properties.core.actions import ActionMachine, Impossible, action, token_lists
from harness.properties.core.adapter import Adapter
from harness.properties.core.findings import Violation
from harness.properties.core.search import not_offered, search
from harness.properties.core.subject import Subject
from harness.properties.scheduler.adapter import OPTIONAL, REQUIRED

__all__ = ["check_scheduler", "not_checked"]

MAX_TOKENS = 12
MAX_EMPTY_STEPS = 2
"""Steps in a row that may schedule nothing while requests wait."""
END_OF_SEQUENCE = 2
CHOICES = st.integers(0, 7)
SAMPLED = st.integers(0, 3**4 - 1).map(lambda number: [number // 3**place % 3 for place in range(4)])
"""Tokens 0, 1 and the end of sequence, as the four digits of one number."""


def check_scheduler(factory: Callable[..., Any], settings: Settings) -> None:
    """Search for arrivals and steps after which an invariant of a scheduler does not hold.

    `factory` makes an adapter, see `SchedulerAdapter`.

    Raises:
        PropertyError: it found some; the error holds the shortest program.
        HarnessError: the adapter lacks a method.
    """
    search(lambda: SchedulerMachine(factory), settings)


def not_checked(factory: Callable[..., Any]) -> list[str]:
    """Name what the adapter does not offer, and the invariants that are therefore not checked, or checked less."""
    sizes = {"num_blocks": 4, "block_size": 2, "max_num_batched_tokens": 4, "max_num_seqs": 2, "max_model_len": 8}
    subject = Subject(factory, "scheduler", required=REQUIRED, **sizes)
    lines = not_offered(subject, "scheduler", OPTIONAL)
    if not Adapter.of(factory).takes("hash_bits"):
        lines.append("scheduler: no keyword hash_bits: hashes do not collide (10)")
    if not subject.takes("add", "salt"):
        lines.append("scheduler: add has no keyword salt (10)")
    return [*lines, "scheduler: 24 needs an engine's output, 26 more than one rank"]


@dataclass(slots=True, kw_only=True, eq=False)
class Job(Request):
    """A request with its place in the queue."""

    arrival: int
    """Its number, a fork's that of its parent."""
    num_left: int
    """Tokens that it may still sample."""
    is_running: bool = False
    was_preempted: bool = False

    @property
    def num_total(self) -> int:
        """Tokens when it ends."""
        return len(self.token_ids) + self.num_left


class SchedulerMachine(ActionMachine):
    """Drives a scheduler as an engine would, without a model."""

    starts: ClassVar = {
        "num_blocks": st.integers(2, 9),
        "block_size": st.integers(1, 4),
        "budget": st.sampled_from((1, 2, 3, 5, 50)),
        "max_num_seqs": st.integers(1, 4),
        "max_model_len": st.integers(2, 16),
        "hash_bits": st.sampled_from((None, None, 0, 2)),
    }

    def __init__(self, factory: Callable[..., Any]) -> None:
        super().__init__()
        self._factory = factory

    def start(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        max_model_len: int,
        hash_bits: int | None,
    ) -> None:
        """Make a scheduler."""
        sizes: dict[str, object] = {
            "num_blocks": num_blocks, "block_size": block_size, "max_num_batched_tokens": budget,
            "max_num_seqs": max_num_seqs, "max_model_len": max_model_len,
        }  # fmt: skip
        if hash_bits is not None and Adapter.of(self._factory).takes("hash_bits"):
            sizes["hash_bits"] = hash_bits
        self.num_blocks, self.budget = num_blocks, budget
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.subject = Subject(self._factory, "scheduler", required=REQUIRED, **sizes)
        self.offers = {method: self.subject.offers(method) for method in OPTIONAL}
        self.has_salts = self.subject.takes("add", "salt")
        self.tables = Tables(self.subject, num_blocks=num_blocks, block_size=block_size, are_exact=False)
        self.cached = CachedBlocks(self.subject, self.tables, block_size)
        self.jobs: dict[int, Job] = {}
        self.num_requests = 0
        self.num_empty_steps = 0

    # Requests come and go

    @action(
        weight=3,
        token_ids=token_lists(MAX_TOKENS),
        max_new_tokens=st.integers(1, 5),
        salt=st.booleans(),
        is_cut=st.sampled_from((True, True, True, True, True, False)),
    )
    def add(self, token_ids: list[int], max_new_tokens: int, salt: bool, is_cut: bool) -> None:
        """Queue a request; `is_cut`: one that is possible."""
        if is_cut:
            longest = min(self.max_model_len, self.num_blocks * self.tables.oracle.block_size)
            max_new_tokens = min(max_new_tokens, longest - 1)
            token_ids = token_ids[: longest - max_new_tokens]
        if not token_ids or not max_new_tokens:
            raise Impossible
        job = self._job(token_ids, max_new_tokens, salt="x" if salt and self.has_salts else "")
        salted = {"salt": job.salt} if job.salt else {}
        arguments = (job.request_id, token_ids, max_new_tokens)
        if self._fits(job.num_total):
            self.subject.do(21, "add", *arguments, **salted)
        else:
            error = self.subject.error_of("add", *arguments, **salted)
            # The last token is sampled and not fed: whether it needs a slot is the engine's own choice.
            if error is not None or not self._fits(job.num_total - 1):
                self._check_refusal(job, error)
                return
        self.jobs[job.request_id] = job

    @action(when=lambda self: self.offers["fork"] and self.jobs, choice=CHOICES)
    def fork(self, choice: int) -> None:
        """Continue a request twice."""
        parent = self._chosen(choice)
        child = self._job(parent.token_ids, parent.num_left, salt=parent.salt)
        child.arrival = parent.arrival
        self.subject.do(23, "fork", parent.request_id, child.request_id)
        self.jobs[child.request_id] = child
        self._note_running()
        if child.is_running:
            child.num_computed = parent.num_computed

    @action(when=lambda self: self.offers["abort"] and self.jobs, choice=CHOICES)
    def abort(self, choice: int) -> None:
        """Drop a request, wherever it stands."""
        self._remove(self._chosen(choice), "abort")

    @action(weight=6, when=lambda self: self.jobs, sampled=SAMPLED)
    def step(self, sampled: list[int]) -> None:
        """Compute a step; the requests that have caught up sample `sampled`, then zeros."""
        if not self.jobs:
            raise Impossible
        self._step(sampled)

    def _step(self, sampled: Sequence[int]) -> None:
        was_running = {job.request_id for job in self.jobs.values() if job.is_running}
        chunks = [tuple(chunk) for chunk in self.subject.do(21, "schedule")]
        self._check_chunks(chunks)
        self._note_running(scheduled={request_id for request_id, _, _ in chunks})
        self._check_turns(chunks, was_running)
        self._compute(chunks)
        caught_up = [self.jobs[request_id] for request_id, _, stop in chunks if self._is_caught_up(request_id, stop)]
        token_ids = {job.request_id: token_id for job, token_id in zip(caught_up, _padded(sampled), strict=False)}
        self.subject.do(23, "update", token_ids)
        for job in caught_up:
            job.token_ids.append(token_ids[job.request_id])
            job.num_left -= 1
        for job in caught_up:
            if job.num_left == 0 or job.token_ids[-1] == END_OF_SEQUENCE:
                self._remove(job, "finish")

    def drains(self) -> None:
        """Go on without arrivals: all requests end within a bound."""
        bound = 4 * sum(job.num_total for job in self.jobs.values()) + 10
        for _ in range(bound):
            if not self.jobs:
                break
            self._step([])
            self.holds()
        if self.jobs:
            raise Violation(
                22,
                f"requests {sorted(self.jobs)} are not finished after {bound} steps without arrivals",
                f"assert False, 'requests {sorted(self.jobs)} are still there'",
            )

    # Parts of the actions

    def _job(self, token_ids: Sequence[int], max_new_tokens: int, *, salt: str) -> Job:
        number = self.num_requests
        self.num_requests += 1
        return Job(request_id=number, token_ids=list(token_ids), salt=salt, arrival=number, num_left=max_new_tokens)

    def _chosen(self, choice: int) -> Job:
        jobs = list(self.jobs.values())
        if not jobs:
            raise Impossible
        return jobs[choice % len(jobs)]

    def _fits(self, num_slots: int) -> bool:
        return num_slots <= self.max_model_len and self.tables.num_needed(num_slots) <= self.num_blocks

    def _check_refusal(self, job: Job, error: Exception | None) -> None:
        size = f"{len(job.token_ids)} tokens and {job.num_left} new ones"
        if error is None:
            raise Violation(
                21,
                f"a request of {size} was accepted, where {self.max_model_len} are the longest and {self.num_blocks} "
                f"blocks of {self.tables.oracle.block_size} all there are",
                "raise AssertionError('it was accepted')",
            )
        if len(re.findall(r"\d+", str(error))) < 2:
            raise Violation(21, f"a request of {size} was refused without the numbers: {error!r}")

    def _remove(self, job: Job, method: str) -> None:
        del self.jobs[job.request_id]
        self.tables.live.pop(job.request_id, None)
        self.subject.do(23, method, job.request_id)

    def _note_running(self, scheduled: Collection[int] = ()) -> None:
        """Note who runs, and who was preempted: it has nothing computed then."""
        running = set(self.subject.ask(20, "running")) if self.offers["running"] else None
        if running is not None and len(running) > self.max_num_seqs:
            raise Violation(
                20, f"requests {sorted(running)} run, where {self.max_num_seqs} may",
                f"assert len({self.subject.name}.running()) <= {self.max_num_seqs}",
            )  # fmt: skip
        for job in self.jobs.values():
            is_running = job.request_id in running if running is not None else job.is_running
            is_running = is_running or job.request_id in scheduled
            if job.is_running and not is_running:
                job.was_preempted, job.num_computed = True, 0
            job.is_running = is_running
        if self.offers["block_table"]:
            self.tables.live = {job.request_id: job for job in self.jobs.values() if job.is_running}

    def _check_chunks(self, chunks: Sequence[tuple[int, ...]]) -> None:
        self.num_empty_steps = 0 if chunks or not self.jobs else self.num_empty_steps + 1
        if self.num_empty_steps > MAX_EMPTY_STEPS:
            raise Violation(
                21, f"nothing is scheduled, and requests {sorted(self.jobs)} wait: a livelock", "assert result"
            )
        ids = [chunk[0] for chunk in chunks]
        if len(set(ids)) < len(ids) or not set(ids) <= self.jobs.keys():
            raise Violation(
                19, f"requests {ids} are scheduled, where {sorted(self.jobs)} are there",
                f"assert sorted(chunk[0] for chunk in result) == {sorted(set(ids) & self.jobs.keys())}",
            )  # fmt: skip
        for request_id, start, stop in chunks:
            num_tokens = len(self.jobs[request_id].token_ids)
            if not 0 <= start < stop <= num_tokens:
                raise Violation(
                    19, f"request {request_id} is scheduled from {start} to {stop} and has {num_tokens} tokens",
                    f"assert {(request_id, start, stop)} not in map(tuple, result)",
                )  # fmt: skip
        num_scheduled = sum(stop - start for _, start, stop in chunks)
        if num_scheduled > self.budget:
            raise Violation(
                19, f"{num_scheduled} tokens are scheduled within a budget of {self.budget}",
                f"assert sum(stop - start for _, start, stop in result) <= {self.budget}",
            )  # fmt: skip
        if len(chunks) > self.max_num_seqs:
            raise Violation(
                20, f"{len(chunks)} requests are scheduled, where {self.max_num_seqs} may run",
                f"assert len(result) <= {self.max_num_seqs}",
            )  # fmt: skip

    def _check_turns(self, chunks: Sequence[tuple[int, ...]], was_running: set[int]) -> None:
        """Verify that nobody starts before a preempted request that arrived earlier."""
        waiting = [job for job in self.jobs.values() if job.was_preempted and not job.is_running]
        for job in (self.jobs[chunk[0]] for chunk in chunks if chunk[0] not in was_running):
            for other in waiting:
                if other.arrival < job.arrival:
                    raise Violation(
                        22,
                        f"request {job.request_id} starts, and request {other.request_id}, which arrived before it and "
                        "was preempted, still waits",
                        f"assert {job.request_id} not in [chunk[0] for chunk in result]",
                    )

    def _compute(self, chunks: Sequence[tuple[int, ...]]) -> None:
        """Write the slots of a step, all before any is read, as each layer does."""
        if self.offers["block_table"]:
            self.tables.refresh()
        for request_id, start, stop in chunks:
            job = self.jobs[request_id]
            if start > job.num_computed > 0:
                raise Violation(
                    19,
                    f"request {request_id} goes on at position {start}, and {job.num_computed} are computed",
                    f"assert {(request_id, start, stop)} not in map(tuple, result)",
                )
            job.num_computed = start  # less where it was preempted and came back, more where it found a prefix
            if self.offers["block_table"]:
                self._check_width(job, stop)
                self.tables.write(job, stop)
            job.num_computed = stop

    def _check_width(self, job: Job, stop: int) -> None:
        source = f"{self.subject.name}.block_table({job.request_id})"
        at_least, at_most = self.tables.num_needed(stop), self.tables.num_needed(self.max_model_len)
        if not at_least <= len(job.table):
            raise Violation(
                15, f"request {job.request_id} computes up to {stop} with a table of {len(job.table)} blocks",
                f"assert len({source}) >= {at_least}",
            )  # fmt: skip
        if len(job.table) > at_most:
            raise Violation(
                25, f"the table of request {job.request_id} has {len(job.table)} blocks, where {at_most} are the width",
                f"assert len({source}) <= {at_most}",
            )  # fmt: skip

    def _is_caught_up(self, request_id: int, stop: int) -> bool:
        return stop == len(self.jobs[request_id].token_ids)

    def holds(self) -> None:
        """Verify tables, owners, free blocks, content and cache, as far as they are shown."""
        if self.offers["block_table"]:
            self.tables.refresh()
            self.tables.check()
            if self.offers["cached_blocks"]:
                self.cached.check_entries()


def _padded(sampled: Sequence[int]) -> list[int]:
    return [*sampled, *[0] * 8]
