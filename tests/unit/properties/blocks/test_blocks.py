"""The suites pass block managers that are unlike ours, and find the bugs that public ones had."""

import pytest

from harness.properties.blocks.suite import check_block_manager
from harness.properties.core.findings import PropertyError
from harness.properties.core.profiles import PROFILES

from ..programs import assert_fails_in_its_last_line
from . import chained, radix

DEV = PROFILES["dev"].settings()

BUGS = [
    (chained.BlockSizeOne, {15}),
    (chained.PublishedBeforeCompute, {8, 9}),
    (chained.CrashOnExhaustion, {12}),
    (chained.WholePromptCached, {12, 14}),
    (chained.HitCountedAsFree, {12}),
    (chained.StaleKey, {8, 9}),
    (radix.DuplicateFreed, {4}),
    (radix.DuplicateLeaked, {1}),
    (radix.LockedEvicted, {1, 3, 4, 11}),
    (radix.InnerNodeEvicted, {1, 15, 18}),
    (radix.AbortKeepsLocks, {1}),
    (radix.CrashOnExhaustion, {12}),
]


@pytest.mark.parametrize("manager", [chained.ChainedManager, radix.RadixManager])
def test_a_correct_block_manager_passes(manager: type) -> None:
    check_block_manager(manager, DEV)


@pytest.mark.parametrize(("manager", "invariants"), BUGS)
def test_a_known_bug_is_found_and_told_as_a_program(manager: type, invariants: set[int]) -> None:
    with pytest.raises(PropertyError) as caught:
        check_block_manager(manager, DEV)
    assert caught.value.invariant in invariants
    assert_fails_in_its_last_line(caught.value.program, manager)
