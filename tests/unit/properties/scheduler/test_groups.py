"""The scheduler suite with groups of layers, host memory and a prefix cache: each bug behind the scheduler is found."""

import pytest

from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES
from harness.properties.reference.scheduler import SchedulerSubject
from harness.properties.scheduler.suite import search_scheduler

from ..blocks.mutants import BLOCK_MUTANTS
from ..mutation import Mutant
from ..programs import assert_fails_in_its_last_line
from . import groups

DEV = PROFILES["dev"].settings()
CI = PROFILES["ci"].settings()

BUGS = [
    (groups.WindowTooShort, {7}),
    (groups.GroupsShareKeys, {3, 7, 8}),
    (groups.GivenUpAndLost, {1}),
    (groups.SwappedInTooLate, {7, 8}),
    (groups.LastSwapLost, {7, 8}),
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheduler", [groups.HybridScheduler, groups.SwappingScheduler])
def test_a_correct_scheduler_passes(scheduler: type) -> None:
    search_scheduler(scheduler, DEV).raise_findings()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("scheduler", "invariants"), BUGS)
def test_a_bug_is_found_and_told_as_a_program(scheduler: type, invariants: set[int]) -> None:
    report = search_scheduler(scheduler, CI, is_first_enough=True)
    with pytest.raises(PropertyError) as caught:
        report.raise_findings()
    assert caught.value.invariant in invariants
    assert_fails_in_its_last_line(caught.value.program, scheduler)


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
