"""Every mutant of the reference engine's scheduler is killed, by the invariant that it breaks."""

import pytest

from harness.properties.core.search import PROFILES
from harness.properties.reference.scheduler import SchedulerSubject
from harness.properties.scheduler.suite import search_scheduler

from ..mutation import Mutant
from .mutants import SCHEDULER_MUTANTS, SURVIVORS

CI = PROFILES["ci"].settings()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mutant", SCHEDULER_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_scheduler_suite_kills(mutant: Mutant) -> None:
    with mutant.planted():
        findings = search_scheduler(SchedulerSubject, CI, is_first_enough=True).findings
    assert findings
    assert findings[0].invariant in mutant.killed_by


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SURVIVORS, ids=lambda mutant: mutant.name)
def test_what_is_listed_as_a_survivor_is_one(mutant: Mutant) -> None:
    with mutant.planted():
        assert not search_scheduler(SchedulerSubject, CI).findings


def test_a_planted_mutant_is_gone_afterwards() -> None:
    for mutant in SCHEDULER_MUTANTS:
        before = vars(mutant.owner)[mutant.target.__name__]
        with mutant.planted():
            assert vars(mutant.owner)[mutant.target.__name__] is not before
        assert vars(mutant.owner)[mutant.target.__name__] is before
