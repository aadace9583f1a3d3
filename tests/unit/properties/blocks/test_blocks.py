"""The suite passes block managers that are unlike ours, and finds the bugs that public ones had.

Among them are groups of layers with windows, and swapping.
"""

import re
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings

from harness.properties.blocks.adapter import OPTIONAL
from harness.properties.blocks.suite import not_checked, search_block_manager
from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES
from harness.properties.reference.blocks import BlockManagerSubject

from ..programs import assert_fails_in_its_last_line
from . import chained, hybrid, radix, swapping

DEV = PROFILES["dev"].settings()
CI = PROFILES["ci"].settings()
FEW = settings(DEV, max_examples=40)
OFFERED = tuple(method for method in OPTIONAL if callable(getattr(BlockManagerSubject, method, None)))

BUGS = [
    (chained.BlockSizeOne, {15}),
    (chained.PublishedBeforeCompute, {8, 9}),
    (chained.CrashOnExhaustion, {12}),
    (chained.WholePromptCached, {12, 14}),
    (chained.HitCountedAsFree, {12}),
    (chained.StaleKey, {8, 9}),
    (radix.DuplicateFreed, {3, 4}),  # 3 where the freed block is given out before anybody looks
    (radix.DuplicateLeaked, {1}),
    (radix.LockedEvicted, {1, 3, 4, 11}),
    (radix.InnerNodeEvicted, {1, 15, 18}),
    (radix.AbortKeepsLocks, {1}),
    (radix.CrashOnExhaustion, {12}),
]
BUGS_OF_GROUPS_AND_SWAPPING = [
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


class ComputesAtOnce(BlockManagerSubject):
    """Publishes as soon as blocks are allocated: an engine that computes whole prompts."""

    def allocate(self, request_id: int, token_ids: Sequence[int], salt: str = "") -> int | None:
        num_cached = super().allocate(request_id, token_ids, salt)
        if num_cached is not None:
            BlockManagerSubject.computed(self, request_id, len(token_ids))
        return num_cached

    def append(self, request_id: int, token_id: int) -> bool:
        has_room = super().append(request_id, token_id)
        if has_room:
            BlockManagerSubject.computed(self, request_id, self.sequences[request_id].num_tokens)
        return has_room


@pytest.mark.sampled(2)
@pytest.mark.parametrize("missing", [*((method,) for method in OFFERED), OFFERED], ids="-".join)
def test_the_reference_manager_passes_without_any_optional_part(missing: tuple[str, ...]) -> None:
    base = ComputesAtOnce if "computed" in missing else BlockManagerSubject
    lesser = type("Lesser", (base,), dict.fromkeys(missing))
    search_block_manager(lesser, FEW).raise_findings()
    assert {line.split()[3] for line in not_checked(lesser) if line.startswith("block manager: no ")} >= set(missing)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "manager", [chained.ChainedManager, radix.RadixManager, hybrid.HybridManager, swapping.SwappingManager]
)
def test_a_correct_block_manager_passes(manager: type) -> None:
    search_block_manager(manager, DEV).raise_findings()


@pytest.mark.parametrize(
    ("manager", "invariants"),
    [*(pytest.param(*bug, marks=pytest.mark.sampled(4)) for bug in BUGS), *BUGS_OF_GROUPS_AND_SWAPPING],
)
def test_a_known_bug_is_found_and_reported_as_a_program(manager: type, invariants: set[int]) -> None:
    report = search_block_manager(manager, CI, is_first_enough=True)
    with pytest.raises(PropertyError) as caught:
        report.raise_findings()
    assert invariants & {finding.invariant for finding in caught.value.findings}
    for finding in caught.value.findings:
        assert_fails_in_its_last_line(finding.program, manager)


class ThirdForkSharesItsTable(BlockManagerSubject):
    """The third fork of a request gets the list of blocks itself, and no copy."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.num_forks: Counter[int] = Counter()

    def fork(self, parent_id: int, child_id: int) -> bool:
        super().fork(parent_id, child_id)
        self.num_forks[parent_id] += 1
        if self.num_forks[parent_id] == 3:
            self.sequences[child_id].block_table = self.sequences[parent_id].block_table
        return True


def test_a_request_is_forked_more_than_once_in_some_hundred_examples() -> None:
    some = settings(DEV, max_examples=500)  # which ones they are depends on the modules that are loaded
    assert search_block_manager(ThirdForkSharesItsTable, some, is_first_enough=True).findings


class NothingHashed(chained.ChainedManager):
    """A prefix cache that never finds anything."""

    def _hits(self, token_ids: Sequence[int]) -> list[chained.Block]:
        return []


class NothingHashedInGroups(hybrid.HybridManager):
    """The same with groups of layers, where how much a look-up must find is not checked."""

    def _num_hits(self, token_ids: Sequence[int]) -> int:
        return 0


def test_a_cache_that_finds_nothing_is_named_among_what_was_not_checked() -> None:
    blind = type("Blind", (NothingHashed,), {"lookup": None})
    report = search_block_manager(blind, FEW)
    (line,) = report.not_checked
    assert re.match(r"block manager: no lookup, and no allocation of \d+ examples found anything: ", line)
    assert not report.findings


def test_a_cache_that_finds_something_is_not_named() -> None:
    blind = type("Blind", (chained.ChainedManager,), {"lookup": None})
    assert search_block_manager(blind, FEW).not_checked == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("manager", [NothingHashed, NothingHashedInGroups])
def test_look_ups_that_find_nothing_in_all_examples_are_a_finding(manager: type) -> None:
    report = search_block_manager(manager, DEV)
    assert 17 in {finding.invariant for finding in report.findings}
    for finding in report.findings:
        if finding.invariant == 17:  # the shortest of all examples: none is shrunk, since each of them shows it
            assert_fails_in_its_last_line(finding.program, manager, most_lines=60)


def test_what_an_engine_lacks_is_listed() -> None:
    lines = not_checked(chained.ChainedManager)
    assert any(line.startswith("block manager: no swap_out") for line in lines)
    assert "block manager: it does not declare windows: groups of layers with a sliding window (7)" in lines
    assert "block manager: with several groups of layers, how much a look-up must find (17)" in not_checked(
        hybrid.HybridManager
    )


def test_the_largest_pool_is_said() -> None:
    class Large(chained.ChainedManager):
        pool_sizes = (2, 70)

    assert "block manager: pools of more than 70 blocks, and blocks of more than 4 tokens" in not_checked(Large)
