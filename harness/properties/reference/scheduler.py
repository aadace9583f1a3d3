"""The reference engine's scheduler, with the admission that stands before it, under the scheduler suite."""

from collections.abc import Mapping, Sequence

from harness.properties.reference.blocks import PoolAndCache
from reference_engine.requests.admission import Admission
from reference_engine.requests.sequence import ScheduledChunk
from reference_engine.scheduler import Scheduler as EngineScheduler


class SchedulerSubject(PoolAndCache):
    """The reference engine's scheduler, with the admission that stands before it, under the scheduler suite."""

    reuses_prefixes = True

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        hash_bits: int | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size, hash_bits)
        self.scheduler = EngineScheduler(
            self.manager, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
        )
        self._admission = Admission(
            vocab_size=1 << 17, max_model_len=max_model_len, num_usable_blocks=num_blocks, block_size=block_size
        )
        self._chunks: list[ScheduledChunk] = []

    def add(self, request_id: int, token_ids: Sequence[int], max_new_tokens: int, salt: str = "") -> None:
        """Check a request and queue it."""
        sequence = self.new_sequence(request_id, token_ids, max_new_tokens, salt)
        self._admission.check(token_ids, sequence.params)
        self.sequences[request_id] = sequence
        self.scheduler.add(sequence)

    def schedule(self) -> list[tuple[int, int, int]]:
        """Choose the next step's chunks."""
        self._chunks = self.scheduler.schedule()
        return [(chunk.sequence.request_id, chunk.start, chunk.stop) for chunk in self._chunks]

    def update(self, sampled: Mapping[int, int]) -> None:
        """Record that the step is computed, and what it sampled."""
        self.scheduler.advance(self._chunks)
        for request_id, token_id in sampled.items():
            self.sequences[request_id].append(token_id)

    def finish(self, request_id: int) -> None:
        """Take a running request out."""
        self.scheduler.finish(self.sequences.pop(request_id))

    def abort(self, request_id: int) -> None:
        """Take a request out, running or waiting."""
        self.scheduler.abort(self.sequences.pop(request_id))

    def fork(self, parent_id: int, child_id: int) -> None:
        """Queue a copy of a request."""
        parent = self.sequences[parent_id]
        self.sequences[child_id] = parent.fork(child_id, parent.params, seed=0)
        self.scheduler.fork(parent, self.sequences[child_id])

    def running(self) -> list[int]:
        """Return the requests that run, in order of arrival."""
        return [sequence.request_id for sequence in self.scheduler.running]
