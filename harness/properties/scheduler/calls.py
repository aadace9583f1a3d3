"""The calls of an engine to a scheduler: it plans a step, computes it and reports it, perhaps after planning the next.

The machine computes a step when the scheduler plans it, in order, as on the stream of a GPU. It also samples at that
time, and reports the tokens later by `update`.
"""

from collections.abc import Collection, Sequence
from typing import Any

from harness.properties.blocks.prefix_cache import CacheEntries
from harness.properties.blocks.tables import Tables
from harness.properties.core.falsify import NamedAdapter
from harness.properties.core.findings import Invariant, Violation
from harness.properties.core.machine import Machine, NotApplicable
from harness.properties.core.subject import Subject
from harness.properties.scheduler.adapter import OPTIONAL, REQUIRED, SchedulerCapabilities
from harness.properties.scheduler.requests import Chunk, Reuse, ScheduledRequest, ScheduledStep, SchedulerLimits

MAX_EMPTY_STEPS = 2
"""Steps in a row that may schedule nothing while requests wait."""
END_OF_SEQUENCE = 2


class SchedulerCalls(Machine):
    """A scheduler with the suite's record of its requests, tables and cache."""

    def __init__(self, factory: Any) -> None:
        super().__init__()
        self.adapter = NamedAdapter.of(factory)
        self.declared = SchedulerCapabilities.of(self.adapter)

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
        declared = self.declared
        if not declared.chunks_prompts:
            budget = max(budget, max_model_len)
        self.collides = hash_bits is not None and self.adapter.takes("hash_bits")
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        self.subject = Subject(
            self.adapter, "scheduler", required=REQUIRED, num_blocks=num_blocks, block_size=block_size,
            max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
            **({"hash_bits": hash_bits} if self.collides else {}),
        )  # fmt: skip
        self.offers = {method: self.subject.offers(method) for method in (*OPTIONAL, "finish")}
        self.has_salts = self.subject.takes("add", "salt")
        self.limits = SchedulerLimits(
            declared=declared, budget=budget, max_num_seqs=max_num_seqs, max_model_len=max_model_len, note=self.note
        )
        self.tables = Tables(
            self.subject, declared, num_blocks=num_blocks, block_size=block_size, are_exact=False,
            num_lookahead=declared.num_lookahead,
        )  # fmt: skip
        self.tables.knows_all = self.offers["running"]
        self.entries = CacheEntries(self.subject, self.tables, block_size, self.note)
        can_be_seen = self.offers["block_table"] and self.offers["running"] and not declared.has_groups
        self.reuse = Reuse(
            self.tables, block_size, self.note,
            is_checked=declared.reuses_prefixes and can_be_seen and not self.collides,
        )  # fmt: skip
        self.requests: dict[int, ScheduledRequest] = {}
        self.in_flight: list[ScheduledStep] = []
        self.num_requests = 0
        self.num_empty_steps = 0

    def fits(self, num_slots: int) -> bool:
        """Whether a request with so many slots can be served."""
        return num_slots <= self.max_model_len and self.tables.fits(num_slots)

    def new_request(self, request_id: int, token_ids: Sequence[int], num_left: int, salt: str) -> ScheduledRequest:
        """Return a new request; its id is larger than that of all earlier ones."""
        if request_id < self.num_requests:
            raise NotApplicable
        self.num_requests = request_id + 1
        return ScheduledRequest(
            request_id=request_id, token_ids=list(token_ids), salt=salt, arrival=request_id, num_left=num_left
        )

    def remove(self, request: ScheduledRequest, method: str) -> None:
        """Remove a request."""
        self.reuse.note_released(request, self.in_flight, is_kept=method == "finish")
        del self.requests[request.request_id]
        self.tables.live.pop(request.request_id, None)
        if self.offers[method]:  # a scheduler without `finish` has done it in `update`
            self.subject.do(Invariant.REMOVAL, method, request.request_id)

    # A step

    def plan(self, sampled: Sequence[int], num_accepted: int) -> None:
        """Call `schedule` for the next step, and compute it.

        `sampled` are the tokens of the requests that have caught up, then zeros. Of the drafts of each request, up to
        `num_accepted` are accepted.
        """
        was_running = {request.request_id for request in self.requests.values() if request.is_running}
        chunks = [Chunk(*chunk) for chunk in self.subject.do(Invariant.ADMISSION, "schedule")]
        self._check_progress(chunks)
        self.limits.check_chunks(chunks, self.requests)
        self.note_running(scheduled={chunk.request_id for chunk in chunks})
        if self.offers["running"]:
            self.limits.check_turns(chunks, self.requests, was_running)
        self._compute(chunks, was_running)
        self.in_flight.append(self._sample(chunks, list(sampled), num_accepted))
        for chunk in chunks:
            self.reuse.note_computed(self.requests[chunk.request_id])

    def report(self) -> None:
        """Report the oldest step in flight, and finish the requests that end with it."""
        step = self.in_flight.pop(0)
        tokens = step.sampled if self.declared.reports_lists else {key: new[0] for key, new in step.sampled.items()}
        dropped = self.subject.do(Invariant.REMOVAL, "update", dict(tokens))
        for request_id, new in step.sampled.items():
            request = self.requests.get(request_id)
            if request is not None:
                request.num_reported += len(new)
                if request_id in (dropped or ()):
                    self._take_back(request, len(new))
                    step.ended.discard(request_id)
        self._check_still_there(step.ended)
        for request_id in sorted(step.ended & self.requests.keys()):
            self.remove(self.requests[request_id], "finish")

    def _check_still_there(self, ended: Collection[int]) -> None:
        """Verify that no request that may still sample has been removed."""
        running = self._running() if self.offers["running"] else set(self.requests)
        for request in self.requests.values():
            if request.is_running and request.request_id not in running | set(ended):
                raise Violation(
                    Invariant.REMOVAL,
                    f"request {request.request_id} does not run any more with {request.num_reported} of up to "
                    f"{request.num_total} tokens, and none of them is its end",
                    f"assert {request.request_id} in {self.subject.name}.running()",
                )

    def _running(self) -> set[int]:
        return set(self.ask_optional(Invariant.RUNNING_LIMIT, "running") or ())

    def has_ended_in_flight(self) -> bool:
        """Whether a step in flight computes a removed request: its blocks may stay until the step is reported."""
        return any(chunk.request_id not in self.requests for step in self.in_flight for chunk in step.chunks)

    def _take_back(self, request: ScheduledRequest, num_tokens: int) -> None:
        """Forget sampled tokens that the scheduler dropped, because it had preempted the request meanwhile."""
        del request.token_ids[-num_tokens:]
        del request.prefixes[len(request.token_ids) :]
        request.num_left += num_tokens
        request.num_reported -= num_tokens

    def _check_progress(self, chunks: Sequence[Chunk]) -> None:
        is_idle = bool(chunks or not self.requests or self.in_flight)
        self.num_empty_steps = 0 if is_idle else self.num_empty_steps + 1
        if self.num_empty_steps > MAX_EMPTY_STEPS:
            raise Violation(
                Invariant.ADMISSION,
                f"nothing is scheduled, and requests {sorted(self.requests)} wait: a livelock",
                "assert result",
            )

    def note_running(self, scheduled: Collection[int] = ()) -> None:
        """Note which requests run, and which were preempted: these lose their computed tokens."""
        running = self._running()
        self.limits.check_running(running, self.subject.name)
        for request in self.requests.values():
            is_running = request.request_id in running or request.request_id in scheduled
            if self.offers["running"] and request.is_running and not is_running:
                self.reuse.note_released(request, self.in_flight, is_kept=False)
                request.leave()
                request.was_preempted, request.num_computed = True, 0
                request.is_generating, request.drafts = False, []
            request.is_running = is_running
        if self.offers["block_table"]:
            self.tables.live = {key: request for key, request in self.requests.items() if request.is_running}

    def _compute(self, chunks: Sequence[Chunk], was_running: Collection[int]) -> None:
        """Write all slots of a step before reading any, as each layer does."""
        self._carry_out_swaps()
        before = {key: list(request.table) for key, request in self.tables.live.items()}
        if self.offers["block_table"]:
            self.tables.refresh()
            self.reuse.check(chunks, self.requests, was_running, before)
        for chunk in chunks:
            request = self.requests[chunk.request_id]
            self._check_start(chunk, request, before.get(chunk.request_id, []))
            num_extra = chunk.stop - len(request.token_ids)
            if num_extra > 0:
                request.token_ids += [*request.drafts, *[0] * num_extra][:num_extra]
            request.num_computed = chunk.start  # less after a preemption, more after a prefix hit
        starting = [chunk for chunk in chunks if chunk.request_id not in was_running]
        cached_tokens = (
            {chunk.request_id: chunk.start for chunk in starting} if self.declared.shares_within_step else {}
        )
        for chunk in chunks:
            request = self.requests[chunk.request_id]
            if self.offers["block_table"]:
                self._check_width(request, chunk.stop)
                self.tables.write(request, chunk.stop, cached_tokens=cached_tokens)
            request.num_computed = chunk.stop
        for chunk in chunks if self.offers["block_table"] else ():
            self.tables.check_content(self.requests[chunk.request_id], Invariant.SLOT_CONTENT, first_query=chunk.start)

    def _check_start(self, chunk: Chunk, request: ScheduledRequest, before: Sequence[int]) -> None:
        """Verify that a request continues at its position, unless it was preempted and resumed in the same step."""
        # Its blocks show a preemption. It then continues earlier, or later after a hit on another request's prefix.
        has_kept_blocks = bool(before) and request.table[: len(before)] == before
        if not self.offers["running"] or not request.num_computed:
            return
        if chunk.start > request.num_computed or (has_kept_blocks and chunk.start < request.num_computed):
            raise Violation(
                Invariant.STEP_BUDGET,
                f"request {chunk.request_id} goes on at position {chunk.start}, and {request.num_computed} are "
                "computed",
                f"assert {tuple(chunk)} not in map(tuple, result)",
            )

    def _carry_out_swaps(self) -> None:
        for direction, source, target in self.ask_optional(Invariant.FREE_AND_COPY, "take_swaps") or ():
            is_out = direction == "out"
            self.tables.oracle.copy(source if is_out else ("host", source), ("host", target) if is_out else target)

    def _check_width(self, request: ScheduledRequest, stop: int) -> None:
        least, most = self.tables.num_needed(stop), self.tables.num_needed(self.max_model_len)
        for group, table in enumerate(request.tables):
            source = self.tables.source(request, group)
            if not least <= len(table):
                raise Violation(
                    Invariant.TABLE_LENGTH,
                    f"request {request.request_id} computes up to {stop} with a table of {len(table)} blocks",
                    f"assert len({source}) >= {least}",
                )
            if len(table) > most:
                self.note(
                    Invariant.TABLE_WIDTH,
                    f"the table of request {request.request_id} has {len(table)} blocks, and {most} are the width",
                    f"assert len({source}) <= {most}",
                )

    def _sample(self, chunks: Sequence[Chunk], sampled: list[int], num_accepted: int) -> ScheduledStep:
        """Sample the tokens of a step, and remove rejected drafts."""
        step = ScheduledStep(chunks=chunks)
        for chunk in chunks:
            request = self.requests[chunk.request_id]
            if chunk.stop < len(request.token_ids):
                continue
            num_drafts = chunk.stop - self._num_certain(request)
            # Tokens that a request adds without drafts are not rejected. At most the tokens that are left are accepted.
            most_accepted = num_accepted if request.drafts else num_drafts
            num_rejected = max(0, num_drafts - min(most_accepted, max(0, request.num_left - 1)))
            accepted = request.token_ids[chunk.stop - num_drafts : chunk.stop - num_rejected]
            del request.token_ids[chunk.stop - num_rejected :]
            del request.prefixes[chunk.stop - num_rejected :]
            request.num_computed -= num_rejected
            new = sampled.pop(0) if sampled else 0
            request.token_ids.append(new)
            step.sampled[chunk.request_id] = [*accepted, new]
            request.num_left -= len(accepted) + 1
            request.is_generating, request.drafts = True, []
            if request.num_left <= 0 or new == END_OF_SEQUENCE:
                step.ended.add(chunk.request_id)
        return step

    def _num_certain(self, request: ScheduledRequest) -> int:
        """Count the tokens before drafts: those that were reported, and those of steps in flight."""
        in_flight = sum(len(step.sampled.get(request.request_id, ())) for step in self.in_flight)
        return request.num_reported + in_flight
