"""The suite passes a scheduler that is unlike ours, and finds the bugs that public ones had."""

import pytest

from harness.properties.core.findings import PropertyError
from harness.properties.core.profiles import PROFILES
from harness.properties.scheduler.suite import check_scheduler

from ..programs import assert_fails_in_its_last_line
from . import two_phase

DEV = PROFILES["dev"].settings()

SCHEDULER_BUGS = [
    (two_phase.SequencesNotCounted, {20}),
    (two_phase.BudgetIgnoredInDecode, {19}),
    (two_phase.NothingRefused, {21}),
    (two_phase.ExhaustionNotHandled, {21}),
    (two_phase.PreemptedGoesLast, {22}),
]


def test_a_correct_scheduler_passes() -> None:
    check_scheduler(two_phase.TwoPhaseScheduler, DEV)


@pytest.mark.parametrize(("scheduler", "invariants"), SCHEDULER_BUGS)
def test_a_known_bug_of_a_scheduler_is_found_and_told_as_a_program(scheduler: type, invariants: set[int]) -> None:
    with pytest.raises(PropertyError) as caught:
        check_scheduler(scheduler, DEV)
    assert caught.value.invariant in invariants
    assert_fails_in_its_last_line(caught.value.program, scheduler)
