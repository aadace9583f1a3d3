"""Every mutant of a sound state cache is killed, by the invariant that it breaks."""

import pytest

from harness.properties.core.search import PROFILES
from harness.properties.states.suite import search_state_cache

from ..mutation import Mutant
from ..programs import assert_fails_in_its_last_line
from .checkpointed import CheckpointedStates
from .mutants import COMMON_MUTANTS, RARE_MUTANTS

CI = PROFILES["ci"].settings()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mutant", COMMON_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_state_suite_kills(mutant: Mutant) -> None:
    assert_killed(mutant, most_lines=25)


def assert_killed(mutant: Mutant, *, most_lines: int) -> None:
    with mutant.planted():
        findings = search_state_cache(CheckpointedStates, CI, is_first_enough=True).findings
        assert findings
        assert_fails_in_its_last_line(findings[0].program, CheckpointedStates, most_lines=most_lines)
    assert findings[0].invariant in mutant.killed_by


@pytest.mark.slow
@pytest.mark.parametrize("mutant", RARE_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_state_suite_kills_what_few_examples_show(mutant: Mutant) -> None:
    # Hypothesis ends after 500 steps of shrinking: how far these lead depends on the first example that fails.
    assert_killed(mutant, most_lines=50)
