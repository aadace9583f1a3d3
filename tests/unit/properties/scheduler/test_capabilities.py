"""What a scheduler is made for is no bug where its adapter declares it, and one where it does not."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from harness.errors import Code, HarnessError
from harness.properties.core.search import PROFILES
from harness.properties.scheduler.suite import search_scheduler

from ..blocks.chained import Held
from . import two_phase
from .two_phase import Job, TwoPhaseScheduler

DEV = PROFILES["dev"].settings()
CI = PROFILES["ci"].settings()


class WholePromptsOnly(TwoPhaseScheduler):
    """Starts a request only where its prompt fits the budget of the step."""

    def _add_chunk(self, chunks: list[tuple[Job, int, int]], job: Job, budget: int) -> int:
        if job.num_allocated - job.num_computed > self.budget:
            raise MemoryError(f"a prompt of {job.num_allocated} tokens and a budget of {self.budget}")
        if job.num_allocated - job.num_computed > budget:
            return 0
        return super()._add_chunk(chunks, job, budget)


class StepLimited(two_phase.SequencesNotCounted):
    """max_num_seqs bounds each step, not what runs."""

    def _most_decodes(self) -> int:
        return min(self.budget, self.max_num_seqs)


class EndsInUpdate(TwoPhaseScheduler):
    """Takes a request out by itself when it has sampled its last token."""

    finish = None  # type: ignore[assignment]

    def add(self, request_id: int, token_ids: Sequence[int], max_new_tokens: int) -> None:
        super().add(request_id, token_ids, max_new_tokens)
        self.num_left = getattr(self, "num_left", {}) | {request_id: max_new_tokens}

    def update(self, sampled: Mapping[int, int]) -> None:
        super().update(sampled)
        for request_id, token_id in sampled.items():
            self.num_left[request_id] -= 1
            if token_id == 2 or self.num_left[request_id] == 0:
                self.take_out(request_id)


class EndsTooEarly(EndsInUpdate):
    def add(self, request_id: int, token_ids: Sequence[int], max_new_tokens: int) -> None:
        super().add(request_id, token_ids, max_new_tokens)
        self.num_left[request_id] = max(1, max_new_tokens - 1)


@pytest.mark.slow
def test_a_scheduler_may_end_requests_by_itself() -> None:
    search_scheduler(EndsInUpdate, DEV).raise_findings()
    (finding, *_) = search_scheduler(EndsTooEarly, CI, is_first_enough=True).findings
    assert finding.invariant == 23
    assert "does not run any more" in finding.what


CASES = [
    (two_phase.NothingRefused, {"refuses_impossible": False}, {21}),
    (two_phase.BudgetIgnoredInDecode, {"budget_covers": "prompts"}, {19}),
    (StepLimited, {"max_num_seqs_limits": "step"}, {20}),
    (WholePromptsOnly, {"chunks_prompts": False}, {21}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scheduler", "declared", "otherwise"), CASES)
def test_what_is_declared_is_no_finding(scheduler: type, declared: dict[str, Any], otherwise: set[int]) -> None:
    search_scheduler(type("Declared", (scheduler,), declared), DEV).raise_findings()
    findings = search_scheduler(scheduler, CI, is_first_enough=True).findings
    assert {finding.invariant for finding in findings} == otherwise


def test_a_prompt_that_is_cut_is_a_finding_where_none_should_be() -> None:
    class CutAnyway(TwoPhaseScheduler):
        chunks_prompts = False

        def _add_chunk(self, chunks: list[tuple[Job, int, int]], job: Job, budget: int) -> int:
            return super()._add_chunk(chunks, job, min(budget, 2))

    assert 19 in {finding.invariant for finding in search_scheduler(CutAnyway, CI, is_first_enough=True).findings}


class Recorded(TwoPhaseScheduler):
    block_sizes = (32,)
    pool_sizes = (6,)
    budgets = (64, 128)
    max_model_lens = (96, 192)
    seen: set[tuple[int, int, int, int]] = set()  # noqa: RUF012

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        names = ("block_size", "num_blocks", "max_num_batched_tokens", "max_model_len")
        self.seen.add(tuple(sizes[name] for name in names))  # type: ignore[arg-type]


@pytest.mark.slow
def test_only_declared_sizes_are_tried() -> None:
    search_scheduler(Recorded, DEV).raise_findings()
    columns = [set(column) for column in zip(*Recorded.seen, strict=True)]
    assert columns == [{32}, {6}, {64, 128}, {96, 192}]


@pytest.mark.slow
def test_sizes_grow_with_the_blocks_where_nothing_is_said() -> None:
    class LargeBlocks(TwoPhaseScheduler):
        block_sizes = (256,)
        longest = 0

        def add(self, request_id: int, token_ids: Sequence[int], max_new_tokens: int) -> None:
            LargeBlocks.longest = max(LargeBlocks.longest, len(token_ids))
            super().add(request_id, token_ids, max_new_tokens)

    search_scheduler(LargeBlocks, DEV).raise_findings()
    assert LargeBlocks.longest > 2 * 256


@pytest.mark.parametrize(
    "declared",
    [{"budget_covers": "decode"}, {"max_num_seqs_limits": None}, {"budgets": (0,)}, {"chunks_prompts": "yes"}],
)
def test_what_no_scheduler_does_is_refused(declared: dict[str, Any]) -> None:
    with pytest.raises(HarnessError) as caught:
        search_scheduler(type("Bad", (TwoPhaseScheduler,), declared), DEV).raise_findings()
    assert caught.value.code is Code.BAD_ADAPTER
    assert next(iter(declared)) in caught.value.what


@pytest.mark.slow
def test_large_blocks_find_what_small_ones_find() -> None:
    class Leaking(TwoPhaseScheduler):
        block_sizes = (128,)

        def _preempt(self, job: Job) -> None:
            held: Held = self.blocks.held[job.request_id]
            held.blocks = held.blocks[1:]
            super()._preempt(job)

    findings = search_scheduler(Leaking, CI, is_first_enough=True).findings
    assert findings[0].invariant == 1
    assert "block_size=128" in findings[0].program
