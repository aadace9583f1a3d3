"""A workload on the reference engine: its requests driven step by step, each step recorded.

Workloads may force drafts, so that rejected rows are computed, and may have unused memory filled with poison.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from harness.engines.adapter import Part, Timeline, Workload
from harness.engines.poison import Poison, in_range
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import LOGITS
from reference_engine import LLMEngine, SamplingParams, StepInfo, TokenOutput
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.requests.sequence import Sequence as EngineSequence


def run_workload(engine: LLMEngine, workload: Workload, observer: "ReferenceRecorder") -> None:
    """Run all requests of a workload, as its schedule or its timeline says."""
    if workload.timeline is not None:
        _Driver(engine, observer, workload.requests, workload.timeline).run()
        return
    if workload.schedule.num_drafts:
        engine.drafter = observer.drafts
    copies = dict(zip((request.id for request in workload.requests), workload.copies, strict=False))
    forks = copies if workload.schedule.trigger == "forked" else {}
    _drive(engine, observer, workload.requests, forks)
    if not forks and not workload.schedule.has_drafts:
        _drive(engine, observer, workload.copies, {})


def _drive(
    engine: LLMEngine, observer: "ReferenceRecorder", requests: Sequence[RequestInfo], forks: Mapping[int, RequestInfo]
) -> None:
    """Run requests to their end; one named in `forks` is forked when it has made its first token."""
    timeline = Timeline(forks={fork.id: original for original, fork in forks.items()})
    _Driver(engine, observer, [*requests, *forks.values()], timeline).run()


class _Driver:
    """Adds requests to an engine, forks and aborts them, and runs its steps until nothing is left to do."""

    def __init__(
        self, engine: LLMEngine, observer: "ReferenceRecorder", requests: Sequence[RequestInfo], timeline: Timeline
    ) -> None:
        self._engine, self._observer, self._timeline = engine, observer, timeline
        self._requests = {request.id: request for request in requests}
        self._prompt_lengths = {request.id: request.prompt_length for request in requests}
        arriving = [request for request in requests if request.id not in timeline.forks]
        self._arriving = deque(sorted(arriving, key=lambda request: timeline.arrivals.get(request.id, 0)))
        self._forks: dict[int, list[RequestInfo]] = {}
        for fork, original in timeline.forks.items():
            self._forks.setdefault(original, []).append(self._requests[fork])
        self._num_made: Counter[int] = Counter()

    def run(self) -> None:
        """Run all requests to their end."""
        self._engine.observer = self._observer
        for step in count():
            self._add(step)
            if not self._engine.has_unfinished():
                return
            for output in self._engine.step():
                self._follow(output)

    def _add(self, step: int) -> None:
        """Add the requests that have arrived by now; the next one if there is nothing else to do."""
        while self._arriving:
            is_idle = not self._engine.has_unfinished()
            if not is_idle and self._timeline.arrivals.get(self._arriving[0].id, 0) > step:
                return
            request = self._arriving.popleft()
            prompt, detour = request.token_ids[: request.prompt_length], self._observer.drafts.detour(request)
            number = self._engine.add_request(prompt, self._params(request, detour or request))
            self._observer.request_ids[number] = request.id
            self._observer.drafts.begin(request, detour)

    def _follow(self, output: TokenOutput) -> None:
        """Fork the request that has made a token as often as it is to be, and abort it if it has made enough."""
        original = self._observer.request_ids[output.request_id]
        self._num_made[original] += 1
        for fork in self._forks.pop(original, ()) if output.finish_reason is None else ():
            self._prompt_lengths[fork.id], self._num_made[fork.id] = (
                self._prompt_lengths[original],
                self._num_made[original],
            )
            request_id = self._engine.fork(output.request_id, self._params(fork, fork))
            self._observer.request_ids[request_id] = fork.id
        self._go_back(output.request_id, self._requests[original])
        if original in self._timeline.aborted and self._num_made[original] == self._num_wanted(
            self._requests[original]
        ):
            self._engine.abort(output.request_id)

    def _go_back(self, number: int, request: RequestInfo) -> None:
        """Let a request that has computed all of its detour go on with its own tokens."""
        detour = self._observer.drafts.detour(request)
        if detour is not None and self._num_made[request.id] == self._num_wanted(detour):
            self._observer.drafts.begin(request, None)
            self._engine.rewind(number, request.prompt_length, self._params(request, request))

    def _num_wanted(self, request: RequestInfo) -> int:
        """Return how many tokens a request makes: one after each row from its prompt's last one on."""
        return len(request.token_ids) - self._prompt_length(request) + 1

    def _prompt_length(self, request: RequestInfo) -> int:
        return self._prompt_lengths.get(request.id, request.prompt_length)

    def _params(self, request: RequestInfo, fed: RequestInfo) -> SamplingParams:
        """Feed what follows the prompt in `fed`, as far; what the engine would have chosen is still reported."""
        forced = fed.token_ids[self._prompt_length(fed) :]
        num_tokens = self._num_wanted(request) + (request.id in self._timeline.aborted)
        adapter = next(iter(self._engine.runner.adapters), None)
        return SamplingParams(
            max_new_tokens=num_tokens, forced_token_ids=forced or None, ignore_eos=True, adapter=adapter
        )


class ForcedDrafts:
    """Guesses what a workload says, whatever the engine would, and tells rejected rows from others."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.request_ids: dict[int, int] = {}
        """By the engine's own number of a request, its id."""
        self._steps = {request.id: _by_start(workload, request) for request in workload.requests}
        self._drafting: dict[int, RequestInfo] = {}

    def draft(self, sequence: EngineSequence) -> Sequence[int]:
        """See `reference_engine.speculation.Drafter`."""
        parts = self._steps[self.request_ids[sequence.request_id]].get(sequence.num_tokens - 1, [])
        return [token for request, part in parts for token in request.token_ids[part.start : part.stop]][1:]

    def detour(self, request: RequestInfo) -> RequestInfo | None:
        """Return what a request computes first and goes back over; None if it does not."""
        if self._workload.schedule.num_drafts:
            return None
        return next(iter(self._workload.drafts(request)), None)

    def begin(self, request: RequestInfo, detour: RequestInfo | None) -> None:
        """Take the rows of a request after the prompt for those of its detour, or for its own again."""
        if detour is None:
            self._drafting.pop(request.id, None)
        else:
            self._drafting[request.id] = detour

    def requests_of(self, numbers: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Return the request of each row of a step. A rejected draft has one of its own: its rows have other tokens."""
        firsts = dict(zip(reversed(numbers), reversed(positions), strict=True))
        drafts = {number: self._rejected(self.request_ids[number], first) for number, first in firsts.items()}
        requests = []
        for number, position in zip(numbers, positions, strict=True):
            draft = drafts[number]
            is_rejected = draft is not None and position >= draft.prompt_length
            requests.append(draft.id if draft is not None and is_rejected else self.request_ids[number])
        return requests

    def _rejected(self, request: int, first: int) -> RequestInfo | None:
        """Return the draft that is given up after a request's step that begins at a position."""
        parts = self._steps.get(request, {}).get(first, [])
        return parts[-1][0] if len(parts) > 1 else self._drafting.get(request)


def _by_start(workload: Workload, request: RequestInfo) -> dict[int, list[Part]]:
    """Return the steps after the prompt by the position that they begin at."""
    if not workload.schedule.num_drafts:
        return {}
    return {parts[0][1].start: parts for parts in workload.steps(request) if parts[0][1].start}


class ReferenceMemory:
    """The slots of one engine's cache, and the states of its blocks.

    The null block is left: the engine keeps zeros there, and never writes it.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._filled: torch.Tensor | None = None
        """[slots] bool: filled before, in blocks that nobody may have written since."""

    def fill_unused(self, value: float) -> int:
        """See `FillsUnused`: free blocks, whatever tables name them, and slots behind what is computed."""
        if self._engine.runner.backend.cache is None:
            return 0
        unused = self._unused()
        anew = unused if self._filled is None else unused & ~self._filled
        self._filled = unused & self._of_blocks(lambda block: not self._engine.pool.num_owners(block))
        return self._fill(anew, value) + self._fill_states(self._by_block(anew).all(1), value)

    def fill_states(self, request: int, value: float) -> int:
        """See `FillsStates`: the blocks that the request alone owns, and that nobody can find in the cache."""
        running = [item for item in self._engine.scheduler.running if item.request_id == request]
        if self._engine.runner.backend.cache is None or not running:
            return 0
        slots = torch.zeros(self._num_slots, dtype=torch.bool)
        slots[self._slots(running[0])] = True
        exclusive = slots & ~self._of_blocks(self._is_shared)
        return self._fill(exclusive, value) + self._fill_states(self._by_block(exclusive).any(1), value)

    @property
    def _num_slots(self) -> int:
        return self._engine.pool.num_blocks * self._engine.pool.block_size

    def _unused(self) -> torch.Tensor:
        """[slots] bool."""
        pool = self._engine.pool
        unused = ~self._of_blocks(self._is_cached)
        for sequence in self._engine.scheduler.running:
            unused[self._slots(sequence)] = False
        unused |= self._of_blocks(lambda block: not pool.num_owners(block) and not self._is_cached(block))
        unused[: pool.block_size * (NULL_BLOCK + 1)] = False
        return unused

    def _of_blocks(self, is_wanted: Callable[[int], bool]) -> torch.Tensor:
        """[slots] bool: those of some blocks."""
        pool = self._engine.pool
        blocks = torch.tensor([is_wanted(block) for block in range(pool.num_blocks)])
        return blocks.repeat_interleave(pool.block_size)

    def _is_cached(self, block: int) -> bool:
        cache = self._engine.pool.prefix_cache
        return cache is not None and block in cache

    def _is_shared(self, block: int) -> bool:
        return self._engine.pool.num_owners(block) > 1 or self._is_cached(block)

    def _slots(self, sequence: EngineSequence) -> torch.Tensor:
        """Return the slots [tokens] of what a request has computed."""
        size, positions = self._engine.pool.block_size, torch.arange(sequence.num_computed_tokens)
        return torch.tensor(list(sequence.block_table))[positions // size] * size + positions % size

    def _fill(self, is_wanted: torch.Tensor, value: float) -> int:
        cache = self._engine.runner.backend.cache
        assert cache is not None
        slots = is_wanted.nonzero()[:, 0].to(cache.data.device)
        flat = cache.data.flatten(2, 3)  # [K and V, layers, slots, KV heads, head size]
        flat.index_fill_(2, slots, in_range(value, flat.dtype))
        return len(slots) * flat[:, :, :1].numel()

    def _by_block(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.view(-1, self._engine.pool.block_size)

    def _fill_states(self, is_wanted: torch.Tensor, value: float) -> int:
        """Fill the states of some blocks, [blocks] bool."""
        states = self._engine.runner.states
        if states is None:
            return 0
        blocks = is_wanted.nonzero()[:, 0]
        kept = (states.conv_LBCW, states.recurrent_LBNAH)
        for item in kept:
            item.index_fill_(1, blocks.to(item.device), in_range(value, item.dtype))
        return len(blocks) * sum(item[:, :1].numel() for item in kept)


@dataclass(slots=True)
class ReferenceRecorder:
    """The engine's observer: hands every step to the recording."""

    writer: RecordingWriter
    drafts: ForcedDrafts
    poison: Poison | None
    memory: ReferenceMemory | None

    @property
    def request_ids(self) -> dict[int, int]:
        """By the engine's own number of a request, its id."""
        return self.drafts.request_ids

    def begin_step(self, step: StepInfo) -> None:
        """See `reference_engine.Observer`; poison is filled in before the rows are computed."""
        if self.poison is not None and step.phase != "readback":
            numbers = (number for number, request in self.request_ids.items() if request == self.poison.victim)
            self.poison.before_step(self.memory, next(numbers, None))
        request = self.drafts.requests_of(step.request_ids, step.positions)
        tables = {self.request_ids[number]: blocks for number, blocks in step.block_tables.items()}
        for draft, number in zip(request, step.request_ids, strict=True):  # whose rows are in its request's blocks
            if number in step.block_tables:
                tables[draft] = step.block_tables[number]
        self.writer.begin_step(
            phase=step.phase,
            request=request,
            position=step.positions,
            sampled_rows=step.sampled_rows,
            slot_mapping=step.slot_mapping or None,
            block_tables=tables or None,
            partial_rows={LOGITS: step.sampled_rows} if len(step.sampled_rows) else None,
        )

    def tap(self, name: str, tensor: torch.Tensor) -> None:
        """See `reference_engine.Observer`."""
        self.writer.tap(name, tensor)

    def end_step(self, sampled: Sequence[int]) -> None:
        """See `reference_engine.Observer`."""
        self.writer.end_step(sampled)
