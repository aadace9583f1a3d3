"""Every mutant of what a suite of calls tests is killed, by the invariant that it breaks."""

from collections.abc import Callable
from typing import Any

import pytest

from harness.properties.blocks.suite import search_block_manager
from harness.properties.core.search import PROFILES
from harness.properties.reference.blocks import BlockManagerSubject
from harness.properties.reference.scheduler import SchedulerSubject
from harness.properties.scheduler.suite import search_scheduler
from harness.properties.states.suite import search_state_cache

from .blocks.mutants import BLOCK_MUTANTS
from .mutation import Mutant
from .programs import assert_fails_in_its_last_line
from .scheduler.mutants import SCHEDULER_MUTANTS, SURVIVORS
from .states.checkpointed import CheckpointedStates
from .states.mutants import COMMON_MUTANTS, RARE_MUTANTS

CI = PROFILES["ci"].settings()
REFERENCE = [
    *(
        pytest.param(search_block_manager, BlockManagerSubject, mutant, id=mutant.name, marks=pytest.mark.sampled(7))
        for mutant in BLOCK_MUTANTS
    ),
    *(
        pytest.param(search_scheduler, SchedulerSubject, mutant, id=mutant.name, marks=pytest.mark.sampled(1))
        for mutant in SCHEDULER_MUTANTS
    ),
]
STATES = [
    *(pytest.param(mutant, 25, id=mutant.name, marks=pytest.mark.sampled(2)) for mutant in COMMON_MUTANTS),
    # Hypothesis ends after 500 steps of shrinking: how far these lead depends on the first example that fails.
    *(pytest.param(mutant, 50, id=mutant.name, marks=pytest.mark.slow) for mutant in RARE_MUTANTS),
]


@pytest.mark.parametrize(("search", "subject", "mutant"), REFERENCE)
def test_a_mutant_of_the_reference_engine_is_killed(search: Callable[..., Any], subject: type, mutant: Mutant) -> None:
    with mutant.planted():
        findings = search(subject, CI, is_first_enough=True).findings
    assert findings
    assert findings[0].invariant in mutant.killed_by


@pytest.mark.parametrize(("mutant", "most_lines"), STATES)
def test_a_mutant_of_a_sound_state_cache_is_killed(mutant: Mutant, most_lines: int) -> None:
    with mutant.planted():
        findings = search_state_cache(CheckpointedStates, CI, is_first_enough=True).findings
        assert findings
        assert_fails_in_its_last_line(findings[0].program, CheckpointedStates, most_lines=most_lines)
    assert findings[0].invariant in mutant.killed_by


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SURVIVORS, ids=lambda mutant: mutant.name)
def test_what_is_listed_as_a_survivor_is_one(mutant: Mutant) -> None:
    with mutant.planted():
        assert not search_scheduler(SchedulerSubject, CI).findings


@pytest.mark.parametrize("mutant", [*BLOCK_MUTANTS, *SCHEDULER_MUTANTS], ids=lambda mutant: mutant.name)
def test_a_planted_mutant_is_gone_afterwards(mutant: Mutant) -> None:
    before = vars(mutant.owner)[mutant.target.__name__]
    with mutant.planted():
        assert vars(mutant.owner)[mutant.target.__name__] is not before
    assert vars(mutant.owner)[mutant.target.__name__] is before
