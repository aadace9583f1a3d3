"""The suite passes schedulers that are unlike ours, and finds the bugs that public ones had.

Among them are groups of layers, host memory and a prefix cache behind the scheduler, steps planned ahead, drafts, and
steps of several tokens.
"""

from typing import Any

import pytest
from hypothesis import settings

from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES
from harness.properties.reference.scheduler import SchedulerSubject
from harness.properties.scheduler.adapter import OPTIONAL
from harness.properties.scheduler.suite import not_checked, search_scheduler
from reference_engine.requests.sequence import ScheduledChunk, Sequence

from ..blocks.mutants import BLOCK_MUTANTS
from ..mutation import Mutant
from ..programs import assert_fails_in_its_last_line
from . import ahead, groups, two_phase

DEV = PROFILES["dev"].settings()
CI = PROFILES["ci"].settings()
FEW = settings(DEV, max_examples=40)
OFFERED = tuple(method for method in OPTIONAL if callable(getattr(SchedulerSubject, method, None)))

SOUND = [
    two_phase.TwoPhaseScheduler,
    *(
        pytest.param(scheduler, marks=pytest.mark.sampled(2))
        for scheduler in (
            groups.HybridScheduler,
            groups.SwappingScheduler,
            ahead.AheadScheduler,
            ahead.SpeculativeScheduler,
            ahead.MultiTokenScheduler,
        )
    ),
]
BUGS = [
    (two_phase.SequencesNotCounted, {20}),
    (two_phase.BudgetIgnoredInDecode, {19}),
    (two_phase.NothingRefused, {21}),
    (two_phase.ExhaustionNotHandled, {21}),
    (two_phase.PreemptedGoesLast, {22}),
]
BUGS_BEHIND_THE_SCHEDULER = [
    (groups.WindowTooShort, {7}),
    (groups.GroupsShareKeys, {3, 7, 8}),
    (groups.GivenUpAndLost, {1}),
    (groups.SwappedInTooLate, {7, 8}),
    (groups.LastSwapLost, {7, 8}),
]
BUGS_OF_STEPS_AHEAD = [
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
REUSE = {
    "owner not counted on a hit": {2, 5, 23},
    "hit block stays idle": {3, 4, 5},
    "stale hash after reuse (vllm#49125)": {8, 9},
    "hash without its parent": {3, 7, 17, 21, 23},
    "hash over a partial block": {8, 9},
    "collision taken as a hit": {3, 7, 23},
    "salt ignored": {3, 7, 23},
    "nothing is ever published": {17},
    "hit leaves no token to compute": {19},
    "hash published before compute": {5, 8, 9},
}
"""By mutant of the reference engine's prefix cache, the invariants that show it through the scheduler."""


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


@pytest.mark.parametrize("scheduler", SOUND)
def test_a_correct_scheduler_passes(scheduler: type) -> None:
    search_scheduler(scheduler, DEV).raise_findings()


@pytest.mark.parametrize(
    ("scheduler", "invariants"),
    [
        *(pytest.param(*bug, marks=pytest.mark.sampled(4)) for bug in (*BUGS, *BUGS_BEHIND_THE_SCHEDULER)),
        *(pytest.param(*bug, marks=pytest.mark.slow) for bug in BUGS_OF_STEPS_AHEAD),
    ],
)
def test_a_bug_of_a_scheduler_is_found_and_reported_as_a_program(scheduler: type, invariants: set[int]) -> None:
    report = search_scheduler(scheduler, CI, is_first_enough=True)
    with pytest.raises(PropertyError) as caught:
        report.raise_findings()
    assert invariants & {finding.invariant for finding in caught.value.findings}
    for finding in caught.value.findings:
        assert_fails_in_its_last_line(finding.program, scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [m for m in BLOCK_MUTANTS if m.name in REUSE], ids=lambda mutant: mutant.name)
def test_a_bug_of_the_prefix_cache_is_found_through_the_scheduler(mutant: Mutant) -> None:
    with mutant.planted():
        findings = search_scheduler(SchedulerSubject, CI, is_first_enough=True).findings
    assert findings
    assert findings[0].invariant in REUSE[mutant.name]


@pytest.mark.slow
def test_reuse_is_expected_only_where_it_is_declared() -> None:
    mutant = next(mutant for mutant in BLOCK_MUTANTS if mutant.name == "nothing is ever published")
    with mutant.planted():
        search_scheduler(type("Silent", (SchedulerSubject,), {"reuses_prefixes": False}), DEV).raise_findings()


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SURVIVORS)
def test_what_is_listed_as_a_survivor_is_one(scheduler: type) -> None:
    search_scheduler(scheduler, DEV).raise_findings()


def test_what_is_not_declared_is_listed() -> None:
    lines = not_checked(ahead.SpeculativeScheduler)
    assert "scheduler: it does not declare max_steps_in_flight = 2: steps planned while one is in flight (23)" in lines
    assert not any(line.startswith("scheduler: no propose") for line in lines)
    assert any(line.startswith("scheduler: no propose") for line in not_checked(ahead.AheadScheduler))
