"""Steps planned ahead, drafts and steps of several tokens: correct schedulers pass, each bug is found."""

import pytest

from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES
from harness.properties.scheduler.suite import not_checked, search_scheduler

from ..programs import assert_fails_in_its_last_line
from . import ahead

DEV = PROFILES["dev"].settings()
CI = PROFILES["ci"].settings()

BUGS = [
    (ahead.FreedTwice, {1, 4}),
    (ahead.AbortedInFlightLeaks, {1}),
    (ahead.TokenLost, {8, 19, 22, 23}),
    (ahead.PendingKept, {19, 21}),
    (ahead.PlannedTwice, {19}),
    (ahead.RejectedCounted, {19, 21}),
    (ahead.RejectedPublished, {8, 9}),
    (ahead.DraftsBeyondTheModel, {25}),
    (ahead.DraftsOverBudget, {19}),
    (ahead.DraftsWithoutSlots, {15}),
    (ahead.CountedOnce, {19}),
]
SURVIVORS = [
    # It computes the last token, which nobody needs, where it has room for it: slower, and nothing is wrong.
    ahead.EndForgotten,
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheduler", [ahead.AheadScheduler, ahead.SpeculativeScheduler, ahead.MultiTokenScheduler])
def test_a_correct_scheduler_passes(scheduler: type) -> None:
    search_scheduler(scheduler, DEV).raise_findings()


@pytest.mark.slow
@pytest.mark.parametrize(("scheduler", "invariants"), BUGS)
def test_a_bug_is_found_and_told_as_a_program(scheduler: type, invariants: set[int]) -> None:
    report = search_scheduler(scheduler, CI, is_first_enough=True)
    with pytest.raises(PropertyError) as caught:
        report.raise_findings()
    assert caught.value.invariant in invariants
    assert_fails_in_its_last_line(caught.value.program, scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SURVIVORS)
def test_what_is_listed_as_a_survivor_is_one(scheduler: type) -> None:
    search_scheduler(scheduler, DEV).raise_findings()


def test_what_is_not_declared_is_listed() -> None:
    lines = not_checked(ahead.SpeculativeScheduler)
    assert "scheduler: it does not declare max_steps_in_flight = 2: steps planned while one is in flight (23)" in lines
    assert not any(line.startswith("scheduler: no propose") for line in lines)
    assert any(line.startswith("scheduler: no propose") for line in not_checked(ahead.AheadScheduler))
