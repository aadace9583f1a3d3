"""The suites pass block managers and a scheduler that are unlike ours, and find the bugs that public ones had."""

import pytest

from harness.properties.blocks.suite import check_block_manager
from harness.properties.core.profiles import PROFILES
from harness.properties.core.subject import PropertyError
from harness.properties.scheduler.suite import check_scheduler

from .managers import chained, radix, two_phase

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
SCHEDULER_BUGS = [
    (two_phase.SequencesNotCounted, {20}),
    (two_phase.BudgetIgnoredInDecode, {19}),
    (two_phase.NothingRefused, {21}),
    (two_phase.ExhaustionNotHandled, {21}),
    (two_phase.PreemptedGoesLast, {22}),
]


@pytest.mark.parametrize("manager", [chained.ChainedManager, radix.RadixManager])
def test_a_correct_block_manager_passes(manager: type) -> None:
    check_block_manager(manager, DEV)


def test_a_correct_scheduler_passes() -> None:
    check_scheduler(two_phase.TwoPhaseScheduler, DEV)


@pytest.mark.parametrize(("manager", "invariants"), BUGS)
def test_a_known_bug_is_found_and_told_as_a_program(manager: type, invariants: set[int]) -> None:
    with pytest.raises(PropertyError) as caught:
        check_block_manager(manager, DEV)
    assert caught.value.invariant in invariants
    assert_fails_in_its_last_line(caught.value.program, manager)


@pytest.mark.parametrize(("scheduler", "invariants"), SCHEDULER_BUGS)
def test_a_known_bug_of_a_scheduler_is_found_and_told_as_a_program(scheduler: type, invariants: set[int]) -> None:
    with pytest.raises(PropertyError) as caught:
        check_scheduler(scheduler, DEV)
    assert caught.value.invariant in invariants
    assert_fails_in_its_last_line(caught.value.program, scheduler)


def assert_fails_in_its_last_line(program: str, target: type) -> None:
    lines = program.splitlines()
    assert len(lines) <= 25
    assert "hypothesis" not in program
    assert lines[0] == f"from {target.__module__} import {target.__name__}"
    lines[0] = ""  # the test's own modules have no path of import
    code = compile("\n".join(lines), "program", "exec")
    with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever the code under test raises
        exec(code, {target.__name__: target})
    in_program = next(entry for entry in caught.traceback if str(entry.path) == "program")
    assert in_program.lineno + 1 == len(lines)
