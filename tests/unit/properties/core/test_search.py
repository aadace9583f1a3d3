"""A search reports every broken invariant once, and ends whatever the code under test does."""

import signal
import types
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import reject

from harness.errors import Code, HarnessError
from harness.properties.blocks.suite import search_block_manager
from harness.properties.core import search
from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES
from harness.properties.core.subject import HangError, call_limited, time_limit
from harness.properties.scheduler.suite import search_scheduler

from ..blocks.chained import ChainedManager
from ..programs import assert_fails_in_its_last_line
from ..scheduler.two_phase import Job, TwoPhaseScheduler

DEV = PROFILES["dev"].settings()


class ThreeBugs(ChainedManager):
    """Always says that there is room for a token, and that nothing is cached."""

    def can_append(self, request_id: int) -> bool:
        return True

    def lookup(self, token_ids: Sequence[int]) -> int:
        return 0


@pytest.mark.slow
def test_every_broken_invariant_is_reported_once_the_worst_first() -> None:
    report = search_block_manager(ThreeBugs, DEV)
    assert [finding.invariant for finding in report.findings] == [12, 13, 17]
    with pytest.raises(PropertyError) as caught:
        report.raise_findings()
    assert caught.value.what.endswith("(2 more)")
    text = str(caught.value)
    assert text.startswith("1 of 3, stops serving\nH092: ")
    assert "\n3 of 3, slow\nH092: " in text


@pytest.mark.slow
def test_each_finding_has_a_program_of_its_own() -> None:
    for finding in search_block_manager(ThreeBugs, DEV).findings:
        assert_fails_in_its_last_line(finding.program, ThreeBugs)


@pytest.mark.slow
def test_an_accepted_invariant_does_not_hide_the_others() -> None:
    with pytest.raises(PropertyError) as caught:
        search_block_manager(ThreeBugs, DEV).raise_findings({12, 13})
    assert [finding.invariant for finding in caught.value.findings] == [17]
    search_block_manager(ThreeBugs, DEV).raise_findings({12, 13, 17})


class Forgetful(TwoPhaseScheduler):
    """Accepts every request."""

    def add(self, request_id: int, token_ids: Sequence[int], max_new_tokens: int) -> None:
        self.waiting.append(Job(request_id, list(token_ids)))


@pytest.mark.slow
def test_where_missing_refusals_are_accepted_no_impossible_request_is_queued() -> None:
    assert [finding.invariant for finding in search_scheduler(Forgetful, DEV).findings] == [21]
    assert search_scheduler(Forgetful, DEV, accepted={21}).findings == []


class UnorderedScheduler(TwoPhaseScheduler):
    """Keeps what runs in a set: the order of its elements depends on where they lie in memory."""

    def _decode(self) -> list[tuple[Job, int, int]]:
        self.active = list(set(self.active))
        return super()._decode()


@pytest.mark.slow
def test_code_that_is_not_deterministic_is_a_finding_with_both_answers() -> None:
    with pytest.raises(PropertyError) as caught:
        search_scheduler(UnorderedScheduler, DEV, accepted={22}).raise_findings({22})
    finding = next(finding for finding in caught.value.findings if finding.invariant == 27)
    assert " in one run and " in finding.what
    assert "def run():" in finding.program
    assert len(finding.program.splitlines()) <= 25
    assert "hypothesis" not in str(caught.value).lower()


class DriftingManager(ChainedManager):
    """Has room or not by a counter of all instances, so that what can be chosen next differs from run to run."""

    num_calls = 0

    def append(self, request_id: int, token_id: int) -> bool:
        DriftingManager.num_calls += 1
        return DriftingManager.num_calls % 3 > 0 and super().append(request_id, token_id)


@pytest.mark.slow
def test_choices_that_differ_from_run_to_run_do_not_end_in_a_traceback_of_hypothesis() -> None:
    report = search_block_manager(DriftingManager, DEV)
    assert 27 in [finding.invariant for finding in report.findings]


class SomeSizesOnly(ChainedManager):
    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        if block_size % 2:
            raise NotImplementedError(f"block size {block_size} is odd")
        super().__init__(num_blocks=num_blocks, block_size=block_size)


class NoSizes(ChainedManager):
    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        raise NotImplementedError("not today")


class RejectsLongPrompts(ChainedManager):
    def allocate(self, request_id: int, token_ids: Sequence[int]) -> int | None:
        if len(token_ids) > 6:
            reject()
        return super().allocate(request_id, token_ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("manager", "reason"), [(SomeSizesOnly, "is odd"), (RejectsLongPrompts, "UnsatisfiedAssumption")]
)
def test_examples_that_an_adapter_rejects_are_counted(manager: type, reason: str) -> None:
    report = search_block_manager(manager, DEV)
    report.raise_findings()
    assert 0 < report.rejections.total() < report.num_examples
    assert any(reason in text for text in report.rejections)


def test_an_adapter_that_rejects_every_example_does_not_pass() -> None:
    with pytest.raises(HarnessError, match="H051: the adapter rejected all") as caught:
        search_block_manager(NoSizes, DEV).raise_findings()
    assert (caught.value.code, caught.value.actual) == (Code.NOTHING_CHECKED, "NotImplementedError: not today")


class AssertsItsSizes(ChainedManager):
    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        assert block_size % 16 == 0
        super().__init__(num_blocks=num_blocks, block_size=block_size)


def test_an_adapter_that_cannot_be_made_is_an_error_that_says_what_to_declare() -> None:
    with pytest.raises(HarnessError, match="H091: the adapter cannot be made: AssertionError") as caught:
        search_block_manager(AssertsItsSizes, DEV).raise_findings()
    assert "block_sizes" in str(caught.value.hint)
    search_block_manager(type("Declared", (AssertsItsSizes,), {"block_sizes": (16,)}), DEV).raise_findings()


class Endless(TwoPhaseScheduler):
    """Waits for room that nobody makes."""

    def _can_append(self, job: Job) -> bool:
        while not super()._can_append(job):
            pass
        return True


def test_a_call_that_never_returns_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "CALL_LIMIT_S", 0.3)
    monkeypatch.setattr(search, "SHRINKING_LIMIT_S", 0.05)
    findings = search_scheduler(Endless, DEV, is_first_enough=True).findings
    assert findings[0].invariant == 21
    assert findings[0].what.startswith("schedule did not return within")
    assert findings[0].program.endswith("scheduler.schedule()  # does not return\n")


def test_the_limit_of_a_call_is_gone_afterwards() -> None:
    with time_limit(0.05):
        assert call_limited(sum, [1, 2]) == 3
    assert sum(range(10**6)) > 0


def test_a_callback_of_the_garbage_collector_is_not_interrupted() -> None:
    def gc_callback() -> str:
        signal.raise_signal(signal.SIGPROF)
        return "went on"

    def call() -> None:
        signal.raise_signal(signal.SIGPROF)

    def call_of_a_weak_set() -> str:
        signal.raise_signal(signal.SIGPROF)
        return "went on"

    of_the_library = types.FunctionType(call_of_a_weak_set.__code__, {"signal": signal, "__name__": "_weakrefset"})
    with time_limit(10):
        assert call_limited(gc_callback) == "went on"
        assert call_limited(of_the_library) == "went on"
        with pytest.raises(HangError):
            call_limited(call)


class NewSetting(TwoPhaseScheduler):
    """What an update reports is not told in the order in which it came."""

    def update(self, sampled: Mapping[int, int]) -> None:
        super().update(dict(reversed(sampled.items())))


@pytest.mark.slow
def test_an_order_that_changes_nothing_is_no_finding() -> None:
    search_scheduler(NewSetting, DEV).raise_findings()
