"""Requests that find, share or lose blocks: sound engines pass, and bugs of the cache are found under the schedule
that reaches them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import Code
from harness.formats.case import RequestSpec
from harness.judge.jobs.check import run_check
from harness.plan import plan_request
from harness.results.check import Outcome, RunResult
from reference_engine.block_manager import BlockManager
from reference_engine.block_pool import BlockPool
from reference_engine.engine import LLMEngine
from reference_engine.prefix_cache import Prefix

SCHEDULES = ("prefix-hit", "forked", "preempted")
PROMPTS = [list(range(10, 31)), list(range(40, 46))]
NUM_NEW, BLOCK_SIZE = 6, 4


@pytest.fixture
def check(checkpoints: Path) -> Callable[..., RunResult]:
    def checked(schedule: str, *, prompts: list[list[int]] = PROMPTS, num_new: int = NUM_NEW) -> RunResult:
        plan = plan_request(
            model=str(checkpoints / "qwen3-tiny"),
            engine="reference",
            dtype="float32",
            device="cpu",
            requests=[RequestSpec(token_ids=prompt) for prompt in prompts],
            max_new_tokens=num_new,
            schedules=[schedule],
            engine_options={"block_size": str(BLOCK_SIZE)},
        )
        (run,) = run_check(plan).runs
        return run

    return checked


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_sound_engine_passes(check, schedule):
    run = check(schedule)
    assert run.findings == ()
    assert run.outcome is Outcome.PASS
    assert schedule.replace("-", "_") in run.coverage.triggers


@pytest.mark.slow
def test_what_is_shared_is_not_computed_again(check):
    cold, warm = check("plain").num_rows, check("prefix-hit").num_rows
    hits = sum((len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS)
    assert warm == 2 * cold - hits
    assert check("forked").num_rows == 2 * cold - sum(len(prompt) for prompt in PROMPTS)


@pytest.mark.slow
def test_prompts_that_begin_alike_are_read_from_whoever_computed_them(check):
    alike = [[*range(10, 22), 1, 2, 3], [*range(10, 22), 4, 5], [*range(10, 22), 1, 2, 3]]
    assert check("prefix-hit", prompts=alike).findings == ()
    assert check("forked", prompts=alike).findings == ()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_that_reached_nothing_fails(check, schedule):
    run = check(schedule, prompts=[[5, 6]], num_new=1)
    assert Code.TRIGGER_NOT_REACHED in {finding.code for finding in run.findings}


def hit_without_comparing_the_parent(patch: pytest.MonkeyPatch) -> None:
    """The second block of a prompt is found by its own tokens alone: it may be that of another beginning."""
    extend = BlockManager.take_prefix

    def keyed_by_own_tokens(self, sequence):
        cache = self._cache
        cache._hash = lambda data: data[-8 * BLOCK_SIZE :]
        patch.setattr(Prefix, "is_same", lambda self, prefix: self.token_ids == prefix.token_ids)
        return extend(self, sequence)

    patch.setattr(BlockManager, "take_prefix", keyed_by_own_tokens)


def fork_without_copying(patch: pytest.MonkeyPatch) -> None:
    """The shared last block is written by both."""
    patch.setattr(BlockPool, "num_owners", lambda self, block: 1)
    patch.setattr(LLMEngine, "_copy_block", lambda self, source, target: None)


def resume_as_if_computed(patch: pytest.MonkeyPatch) -> None:
    """A preempted request gets other blocks, and takes what they hold for its own."""
    release = BlockManager.release

    def forget_only_the_table(self, sequence):
        computed = sequence.num_computed_tokens
        release(self, sequence)
        if sequence.finish_reason is None:
            sequence.num_computed_tokens = computed

    patch.setattr(BlockManager, "release", forget_only_the_table)


TWINS = [[*range(10, 14), *range(20, 24), 7], [*range(30, 34), *range(20, 24), 8]]
"""Different first blocks, the same second one, whose keys in the first layer depend on nothing but its own tokens."""
BUGS = {
    "prefix hash without its parent": ("prefix-hit", hit_without_comparing_the_parent, TWINS, "model.layers.1.k_cache"),
    "copy-on-write forgotten": ("forked", fork_without_copying, PROMPTS, "model.layers.0.k_cache"),
    "preempted request resumed as if computed": ("preempted", resume_as_if_computed, PROMPTS, "model.layers.0.k_cache"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_the_cache_is_found(check, monkeypatch, name):
    schedule, plant, prompts, first_tap = BUGS[name]
    plant(monkeypatch)
    run = check(schedule, prompts=prompts)
    assert run.outcome is Outcome.MISMATCH
    assert run.first_divergence is not None
    assert run.first_divergence.tap == first_tap
