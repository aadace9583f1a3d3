"""A scheduler in the manner of nano-vllm: a step computes prompts, or, where there are none to compute, decodes."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..blocks.chained import ChainedManager


@dataclass(slots=True, eq=False)
class Job:
    request_id: int
    token_ids: list[int]
    num_allocated: int = 0
    """Tokens that have a slot."""
    num_computed: int = 0


class TwoPhaseScheduler:
    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.blocks = ChainedManager(num_blocks=num_blocks, block_size=block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.budget, self.max_num_seqs, self.max_model_len = max_num_batched_tokens, max_num_seqs, max_model_len
        self.waiting: deque[Job] = deque()
        self.active: list[Job] = []
        self.chunks: list[tuple[Job, int, int]] = []

    def add(self, request_id: int, token_ids: Sequence[int], max_new_tokens: int) -> None:
        num_tokens = len(token_ids) + max_new_tokens
        limit = min(self.max_model_len, self.num_blocks * self.block_size)
        if num_tokens > limit:
            raise ValueError(f"the request has {num_tokens} tokens, and at most {limit} fit")
        self.waiting.append(Job(request_id, list(token_ids)))

    def schedule(self) -> list[tuple[int, int, int]]:
        self.chunks = self._prefill() or self._decode()
        return [(job.request_id, start, stop) for job, start, stop in self.chunks]

    def update(self, sampled: Mapping[int, int]) -> None:
        for job, _, stop in self.chunks:
            self.blocks.computed(job.request_id, stop)
            job.num_computed = stop
            if job.request_id in sampled:
                job.token_ids.append(sampled[job.request_id])

    def finish(self, request_id: int) -> None:
        self.take_out(request_id)

    def take_out(self, request_id: int) -> None:
        self.blocks.free(request_id)
        self.active = [job for job in self.active if job.request_id != request_id]

    def abort(self, request_id: int) -> None:
        if any(job.request_id == request_id for job in self.active):
            self.take_out(request_id)
        else:
            self.waiting = deque(job for job in self.waiting if job.request_id != request_id)

    def running(self) -> list[int]:
        return [job.request_id for job in self.active]

    def block_table(self, request_id: int) -> list[int]:
        return self.blocks.block_table(request_id)

    def num_free(self) -> int:
        return self.blocks.num_free()

    def free_list(self) -> list[int]:
        return self.blocks.free_list()

    def cached_blocks(self) -> dict[int, tuple[int, ...]]:
        return self.blocks.cached_blocks()

    def _prefill(self) -> list[tuple[Job, int, int]]:
        chunks: list[tuple[Job, int, int]] = []
        budget = self.budget
        for job in self.active:
            if budget and job.num_computed < job.num_allocated:
                budget = self._add_chunk(chunks, job, budget)
        while self.waiting and budget and self._may_start(chunks):
            job = self.waiting[0]
            num_cached = self.blocks.allocate(job.request_id, job.token_ids)
            if num_cached is None:
                break
            job.num_computed, job.num_allocated = num_cached, len(job.token_ids)
            self.active.append(self.waiting.popleft())
            budget = self._add_chunk(chunks, job, budget)
        return chunks

    def _may_start(self, chunks: Sequence[object]) -> bool:
        return len(self.active) < self.max_num_seqs

    def _add_chunk(self, chunks: list[tuple[Job, int, int]], job: Job, budget: int) -> int:
        stop = min(job.num_allocated, job.num_computed + budget)
        chunks.append((job, job.num_computed, stop))
        return budget - (stop - job.num_computed)

    def _decode(self) -> list[tuple[Job, int, int]]:
        chunks: list[tuple[Job, int, int]] = []
        todo = deque(self.active)
        while todo and len(chunks) < self._most_decodes():
            job = todo.popleft()
            while not self._can_append(job):
                victim = todo.pop() if todo else job
                self._preempt(victim)
                if victim is job:
                    return chunks
            self.blocks.append(job.request_id, job.token_ids[-1])
            job.num_allocated += 1
            chunks.append((job, job.num_computed, job.num_computed + 1))
        return chunks

    def _most_decodes(self) -> int:
        return self.budget

    def _can_append(self, job: Job) -> bool:
        return self.blocks.can_append(job.request_id)

    def _preempt(self, job: Job) -> None:
        self.blocks.free(job.request_id)
        self.active.remove(job)
        job.num_computed = job.num_allocated = 0
        self.waiting.appendleft(job)


class SequencesNotCounted(TwoPhaseScheduler):
    """max_num_seqs bounds the prompts of one step, not what runs."""

    def _may_start(self, chunks: Sequence[object]) -> bool:
        return len(chunks) < self.max_num_seqs


class BudgetIgnoredInDecode(TwoPhaseScheduler):
    """Only prompts are held to the budget of tokens."""

    def _most_decodes(self) -> int:
        return self.max_num_seqs


class NothingRefused(TwoPhaseScheduler):
    """Requests that can never fit are queued."""

    def add(self, request_id: int, token_ids: Sequence[int], max_new_tokens: int) -> None:
        self.waiting.append(Job(request_id, list(token_ids)))


class ExhaustionNotHandled(TwoPhaseScheduler):
    """A running request is taken to find a block whenever it needs one."""

    def _can_append(self, job: Job) -> bool:
        assert self.blocks.can_append(job.request_id)
        return True


class PreemptedGoesLast(TwoPhaseScheduler):
    """A preempted request queues behind those that arrived after it."""

    def _preempt(self, job: Job) -> None:
        super()._preempt(job)
        self.waiting.rotate(-1)
