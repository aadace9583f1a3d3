"""Every mutant of the reference engine's blocks is killed, by the invariant that it breaks."""

import pytest

from harness.properties.blocks.suite import search_block_manager
from harness.properties.core.search import PROFILES
from harness.properties.reference.blocks import BlockManagerSubject

from ..mutation import Mutant
from .mutants import BLOCK_MUTANTS

CI = PROFILES["ci"].settings()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("mutant", BLOCK_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_block_suite_kills(mutant: Mutant) -> None:
    with mutant.planted():
        findings = search_block_manager(BlockManagerSubject, CI, is_first_enough=True).findings
    assert findings
    assert findings[0].invariant in mutant.killed_by


def test_a_planted_mutant_is_gone_afterwards() -> None:
    for mutant in BLOCK_MUTANTS:
        before = vars(mutant.owner)[mutant.target.__name__]
        with mutant.planted():
            assert vars(mutant.owner)[mutant.target.__name__] is not before
        assert vars(mutant.owner)[mutant.target.__name__] is before
