"""Every mutant of the reference engine's scheduler is killed, by the invariant that it breaks."""

import pytest

from harness.properties.core.findings import PropertyError
from harness.properties.core.profiles import PROFILES
from harness.properties.reference.scheduler import Scheduler
from harness.properties.scheduler.suite import check_scheduler

from ..mutation import Mutant
from .mutants import SCHEDULER_MUTANTS, SURVIVORS

CI = PROFILES["ci"].settings()


@pytest.mark.parametrize("mutant", SCHEDULER_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_scheduler_suite_kills(mutant: Mutant) -> None:
    with mutant.planted(), pytest.raises(PropertyError) as caught:
        check_scheduler(Scheduler, CI)
    assert caught.value.invariant in mutant.killed_by


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SURVIVORS, ids=lambda mutant: mutant.name)
def test_what_is_listed_as_a_survivor_is_one(mutant: Mutant) -> None:
    with mutant.planted():
        check_scheduler(Scheduler, CI)


def test_a_planted_mutant_is_gone_afterwards() -> None:
    for mutant in SCHEDULER_MUTANTS:
        before = vars(mutant.owner)[mutant.target.__name__]
        with mutant.planted():
            assert vars(mutant.owner)[mutant.target.__name__] is not before
        assert vars(mutant.owner)[mutant.target.__name__] is before
