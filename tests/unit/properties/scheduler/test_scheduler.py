"""The suite passes a scheduler that is unlike ours, and finds the bugs that public ones had."""

from typing import Any

import pytest
from hypothesis import settings

from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES
from harness.properties.reference.scheduler import SchedulerSubject
from harness.properties.scheduler.adapter import OPTIONAL
from harness.properties.scheduler.suite import not_checked, search_scheduler
from reference_engine.requests.sequence import ScheduledChunk, Sequence

from ..programs import assert_fails_in_its_last_line
from . import two_phase

DEV = PROFILES["dev"].settings()
CI = PROFILES["ci"].settings()
FEW = settings(DEV, max_examples=40)
OFFERED = tuple(method for method in OPTIONAL if callable(getattr(SchedulerSubject, method, None)))

SCHEDULER_BUGS = [
    (two_phase.SequencesNotCounted, {20}),
    (two_phase.BudgetIgnoredInDecode, {19}),
    (two_phase.NothingRefused, {21}),
    (two_phase.ExhaustionNotHandled, {21}),
    (two_phase.PreemptedGoesLast, {22}),
]


@pytest.mark.slow
@pytest.mark.parametrize("missing", [*((method,) for method in OFFERED), OFFERED], ids="-".join)
def test_the_reference_scheduler_passes_without_any_optional_part(missing: tuple[str, ...]) -> None:
    lesser = type("Lesser", (SchedulerSubject,), dict.fromkeys(missing))
    search_scheduler(lesser, FEW).raise_findings()
    assert {line.split()[2] for line in not_checked(lesser) if line.startswith("scheduler: no ")} >= set(missing)


class SharesWithinAStep(SchedulerSubject):
    """Lets requests find blocks as soon as they are given out, as vLLM does: the step itself fills them."""

    shares_within_step = True

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        grow = self.manager.grow

        def grow_and_publish(sequence: Sequence, num_tokens: int) -> bool:
            has_grown = grow(sequence, num_tokens)
            if has_grown:
                self.manager.publish([ScheduledChunk(sequence, sequence.num_computed_tokens, num_tokens)])
            return has_grown

        self.manager.grow = grow_and_publish  # type: ignore[method-assign]


@pytest.mark.slow
def test_blocks_may_be_shared_in_the_step_that_fills_them() -> None:
    search_scheduler(SharesWithinAStep, FEW).raise_findings()


def test_a_correct_scheduler_passes() -> None:
    search_scheduler(two_phase.TwoPhaseScheduler, DEV).raise_findings()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("scheduler", "invariants"), SCHEDULER_BUGS)
def test_a_known_bug_of_a_scheduler_is_found_and_told_as_a_program(scheduler: type, invariants: set[int]) -> None:
    report = search_scheduler(scheduler, CI, is_first_enough=True)
    with pytest.raises(PropertyError) as caught:
        report.raise_findings()
    assert invariants & {finding.invariant for finding in caught.value.findings}
    for finding in caught.value.findings:
        assert_fails_in_its_last_line(finding.program, scheduler)
