"""Groups of layers with windows, and swapping: correct block managers pass, each bug is found."""

import pytest

from harness.properties.blocks.suite import not_checked, search_block_manager
from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES

from ..programs import assert_fails_in_its_last_line
from . import chained, hybrid, swapping

DEV = PROFILES["dev"].settings()
CI = PROFILES["ci"].settings()

BUGS = [
    (hybrid.WindowTooShort, {7, 10}),
    (hybrid.GivenUpAndListed, {2, 3, 4}),
    (hybrid.GivenUpAndLost, {1, 2}),
    (hybrid.HitOfOneGroup, {7, 8, 10}),
    (hybrid.GroupsShareKeys, {3, 8, 10}),
    (hybrid.NullBlockFreed, {1, 5}),
    (swapping.LastBlockStays, {7}),
    (swapping.CopiedCrosswise, {7}),
    (swapping.HostBlocksLeaked, {1}),
    (swapping.HostBlocksFreeAtOnce, {1, 3}),
    (swapping.HalfSwapped, {1, 4, 12}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("manager", [hybrid.HybridManager, swapping.SwappingManager])
def test_a_correct_manager_passes(manager: type) -> None:
    search_block_manager(manager, DEV).raise_findings()


@pytest.mark.parametrize(("manager", "invariants"), BUGS)
def test_a_bug_is_found_and_told_as_a_program(manager: type, invariants: set[int]) -> None:
    report = search_block_manager(manager, CI, is_first_enough=True)
    with pytest.raises(PropertyError) as caught:
        report.raise_findings()
    assert caught.value.invariant in invariants
    assert_fails_in_its_last_line(caught.value.program, manager)


def test_what_an_engine_lacks_is_listed() -> None:
    lines = not_checked(chained.ChainedManager)
    assert any(line.startswith("block manager: no swap_out") for line in lines)
    assert "block manager: it does not declare windows: groups of layers with a sliding window (7)" in lines
    assert "block manager: with several groups of layers, how much a look-up must find (17)" in not_checked(
        hybrid.HybridManager
    )
