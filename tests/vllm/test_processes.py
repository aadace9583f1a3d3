"""vLLM's engine core in a process of its own: its worker records, and nothing is left of one that dies."""

import os
import signal
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from harness.errors import Code, HarnessError
from harness.results.check import Outcome

from .test_check import check

pytestmark = pytest.mark.slow
OPTIONS = {"multiprocessing": "true"}


def descendants():
    """Return the processes that this one has started, or that those have: but for Python's own tracker of resources."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has ended meanwhile
        if state != "Z" and b"resource_tracker" not in (folder / "cmdline").read_bytes():
            parents[int(folder.name)] = int(parent)
    pids, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        pids |= new
    return pids


def test_the_worker_of_another_process_records(families, monkeypatch):
    monkeypatch.setattr("harness.extensions.vllm.engine.VllmWatcher", None)  # nothing is recorded in this process
    before = descendants()
    (run,) = check(families["llama"], max_new_tokens=6, engine_options=OPTIONS).runs
    assert (run.outcome, run.findings) == (Outcome.PASS, ())
    assert (run.coverage.missing, run.coverage.not_offered) == (0, ())
    assert len({tap.name for tap in run.taps if tap.judged_by == "cache"}) == 2 * 3
    assert descendants() == before


def test_a_worker_that_dies_is_named_and_leaves_nothing(families, monkeypatch):
    from harness.extensions.vllm import engine

    before, drive = descendants(), engine._drive

    def kill_and_drive(opened, requests):
        (pid,) = [process.pid for process in opened.engine_core.resources.engine_manager.processes]
        os.kill(pid, signal.SIGKILL)
        drive(opened, requests)

    monkeypatch.setattr(engine, "_drive", kill_and_drive)
    with pytest.raises(HarnessError) as caught:
        check(families["llama"], max_new_tokens=30, engine_options=OPTIONS)
    assert caught.value.code is Code.ENGINE_FAILED
    assert caught.value.what.startswith("vLLM's engine core ended by signal SIGKILL before it was done")
    assert "EngineDeadError" in caught.value.what
    assert descendants() == before


def test_a_rank_that_dies_between_two_steps_is_named_and_leaves_nothing(families, monkeypatch):
    from harness.extensions.vllm import engine

    before, drive = descendants(), engine._drive

    def drive_and_kill(opened, requests):
        step, worker = opened.step, opened.engine_core.engine_core.model_executor.workers[1].proc
        steps = count()

        def kill_before_the_third():
            if next(steps) == 2:
                os.kill(worker.pid, signal.SIGKILL)
            return step()

        opened.step = kill_before_the_third
        drive(opened, requests)

    monkeypatch.setattr(engine, "_drive", drive_and_kill)
    with pytest.raises(HarnessError) as caught:
        check(families["llama"], schedules=["tensor-parallel"], max_new_tokens=6)
    assert caught.value.code is Code.ENGINE_FAILED
    assert caught.value.what.startswith("rank 1 of 2 ended by signal SIGKILL before it was done")
    assert descendants() == before


def test_the_option_is_a_flag(families):
    with pytest.raises(HarnessError) as caught:
        check(families["llama"], engine_options={"multiprocessing": "7"})
    assert (caught.value.code, caught.value.expected) == (Code.BAD_OPTION, "true or false")
