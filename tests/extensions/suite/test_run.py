"""The driver: every case ends in exactly one way, whatever becomes of its worker."""

import os
from collections import Counter
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.suite.journal import Journal, Ledger
from harness.extensions.suite.pool import Ended, LocalPool
from harness.extensions.suite.result import CaseVerdict
from harness.extensions.suite.run import MOST_ATTEMPTS, Driver
from harness.extensions.suite.task import Loss, TaskResult, case_tasks
from harness.extensions.suite.task_queue import TaskQueue


def run(cases, folder: Path, pool=None, *, resume=False, **options):
    folder.mkdir(exist_ok=True)
    begun = Journal.resume(folder) if resume else Journal.begin(folder)
    with closing(begun) as journal, closing(pool or LocalPool(2)) as workers:
        return Driver(case_tasks(cases, {}), workers, Ledger(journal, folder), **options).run()


def log_of(worker: Path) -> Counter[str]:
    """Count what ran, as `kind name`."""
    return Counter(line.rpartition(" ")[0] for line in (worker / "log").read_text().splitlines())


class ScriptedPool:
    """Answers at once: what a test says of a label, or a pass."""

    num_workers = 2

    def __init__(self, **script):
        self.script = {name: list(outcomes) for name, outcomes in script.items()}
        self.waiting, self.submitted = [], []
        self.has = True

    def refusal(self, case):
        return None

    def start(self, queue):
        group = next(iter(queue.groups()), None)
        if group is None or not self.has or len(self.waiting) == 2:
            return None
        task = queue.take(group)
        self.waiting.append(task)
        self.submitted.append(task.label)
        return task

    def wait(self, timeout_s):
        tasks, self.waiting = self.waiting, []
        return [Ended(task=task, outcome=self.find(task), node="node") for task in tasks]

    def find(self, task):
        outcomes = self.script.get(task.label.replace("golden of ", "golden_"))
        return outcomes.pop(0) if outcomes else TaskResult(verdict="pass", seconds=1.0)

    def close(self):
        pass


def test_every_case_ends_in_one_way_whatever_becomes_of_its_process(worker, make_case, tmp_path):
    names = ["pass", "mismatch", "crash", "exit", "killed", "once-killed", "gone"]
    cases = [make_case(name) for name in names] + [make_case("hang", limit_s=0.3), make_case("bad-prompt", token=9)]
    result = run(cases, tmp_path / "out")
    outcomes = {case.name: (case.verdict.value, case.code) for case in result.cases}
    assert outcomes == {
        "pass": ("pass", None),
        "mismatch": ("mismatch", "H040"),
        "crash": ("error", "H136"),
        "exit": ("error", "H136"),
        "killed": ("lost", "H137"),
        "once-killed": ("pass", None),
        "gone": ("pass", None),
        "hang": ("error", "H135"),
        "bad-prompt": ("error", "H012"),
    }
    reasons = {case.name: case.reason for case in result.cases}
    assert "SIGSEGV" in reasons["crash"]
    assert "exit status 7" in reasons["exit"]
    assert "SIGKILL" in reasons["killed"]
    assert "0.3 s" in reasons["hang"]
    assert next(case.seconds for case in result.cases if case.name == "hang") >= 0.3
    assert reasons["bad-prompt"] == "its golden: the prompt is too long"
    assert {case.name: case.attempts for case in result.cases} == dict.fromkeys(outcomes, 1) | {
        "killed": 3, "once-killed": 2, "gone": 2,
    }  # fmt: skip
    assert result.counts == {"pass": 3, "mismatch": 1, "error": 4, "lost": 1}
    assert result.verdict is CaseVerdict.MISMATCH
    ran = log_of(worker)
    assert ran["case killed"] == MOST_ATTEMPTS
    assert ran["case crash"] == ran["case hang"] == 1, "what is a case's own fault is not tried again"
    assert ran["case bad-prompt"] == 0


def test_a_process_serves_one_task_after_the_other(worker, make_case, tmp_path):
    run([make_case(f"pass-{at}") for at in range(5)], tmp_path / "out", LocalPool(1))
    assert len({line.split()[-1] for line in (worker / "log").read_text().splitlines()}) == 1


def test_what_has_ended_does_not_run_again(worker, make_case, tmp_path):
    cases = [make_case(name) for name in ("pass", "mismatch", "killed")]
    first = run(cases, tmp_path / "out")
    again = run([*cases, make_case("pass-2")], tmp_path / "out", resume=True)
    ran = log_of(worker)
    assert (ran["case pass"], ran["case mismatch"]) == (1, 1)
    assert ran["case killed"] == 2 * MOST_ATTEMPTS, "what was lost is tried again"
    assert sum(times for name, times in ran.items() if name.startswith("golden")) == 1
    assert (again.num_resumed, len(again.cases)) == (2, 4)
    assert again.cases[:2] == first.cases[:2]


def test_a_case_of_the_same_name_that_checks_something_else_runs_again(worker, make_case, tmp_path):
    run([make_case("pass")], tmp_path / "out")
    run([make_case("pass", token=5)], tmp_path / "out", resume=True)
    assert log_of(worker)["case pass"] == 2


def test_a_golden_is_made_once_and_before_the_cases_that_need_it(make_case, tmp_path):
    pool = ScriptedPool()
    cases = [make_case("a"), make_case("b"), make_case("c", token=7)]
    result = run(cases, tmp_path / "out", pool)
    assert pool.submitted == ["golden of a", "golden of c", "a", "b", "c"]
    assert result.num_goldens == 2


def test_a_golden_that_was_lost_three_times_loses_its_cases_and_no_others(make_case, tmp_path):
    pool = ScriptedPool(golden_a=[Loss(reason="node died")] * MOST_ATTEMPTS)
    result = run([make_case("a"), make_case("b"), make_case("c", token=7)], tmp_path / "out", pool)
    assert [case.verdict.value for case in result.cases] == ["lost", "lost", "pass"]
    assert result.cases[0].reason == "its golden was not made: node died (3 attempts)"


def test_a_golden_that_is_gone_from_the_store_is_made_again_once(make_case, tmp_path):
    gone = Loss(reason="gone", needs_golden=True)
    pool = ScriptedPool(a=[gone], b=[gone])
    result = run([make_case("a"), make_case("b")], tmp_path / "out", pool)
    assert result.counts["pass"] == 2
    assert Counter(pool.submitted) == {"golden of a": 2, "a": 2, "b": 2}


def test_without_any_machine_left_the_rest_is_lost_and_not_waited_for(make_case, tmp_path):
    pool = ScriptedPool()
    pool.has = False
    result = run([make_case("a")], tmp_path / "out", pool, no_node_patience_s=0.0)
    assert result.counts["lost"] == 1
    assert "no machine is left" in result.cases[0].reason


def test_what_no_machine_has_is_said_before_the_first_task(worker, make_case, tmp_path):
    with pytest.raises(HarnessError) as caught:
        run([make_case("pass"), make_case("large", cpus=4096.0)], tmp_path / "out")
    assert caught.value.code is Code.RESOURCES_LACKING
    assert caught.value.where == "large"
    assert str(caught.value.expected) == "4096 CPUs"
    assert not (worker / "log").exists()


def test_a_case_that_does_not_fit_beside_others_waits_and_holds_up_nobody(make_case):
    with closing(LocalPool(4)) as pool:
        total = pool._all.cpus
        large, small = make_case("a", cpus=total).resources, make_case("c").resources
        assert pool._has_room(large)
        pool._running[object()] = (ScriptedTask(make_case("b")), [])
        assert not pool._has_room(large)
        assert pool._has_room(small)


class ScriptedTask:
    def __init__(self, case):
        self.case = case


def test_what_has_ended_is_on_disk_before_anything_else_is_handed_over(make_case, tmp_path, monkeypatch):
    path, synced = tmp_path / "out" / "journal.jsonl", []
    monkeypatch.setattr(os, "fdatasync", lambda _descriptor: synced.append(path.read_bytes()))
    pool = ScriptedPool()
    start, missing = pool.start, []

    def start_after_a_look(queue):
        missing.extend([path.read_bytes() != synced[-1]] if synced else [])
        return start(queue)

    pool.start = start_after_a_look
    run([make_case(f"a{at}") for at in range(6)], tmp_path / "out", pool)
    assert missing
    assert not any(missing)
    assert len(synced) == 1 + 3, "once for each batch that ended"


def test_a_task_that_has_no_room_does_not_hold_up_those_behind_it(make_case):
    with closing(LocalPool(3)) as pool:
        pool._shelf.run = lambda _task, _more: TaskResult(verdict="pass")
        pool._running[Future()] = (ScriptedTask(make_case("running")), [])
        cases = [make_case("large", cpus=pool._all.cpus), make_case("a"), make_case("b")]
        queue = TaskQueue(case_tasks(cases, {}), {cases[0].golden_digest(): ()})
        started = [pool.start(queue), pool.start(queue), pool.start(queue)]
    assert [task and task.label for task in started] == ["a", "b", None]
    assert [task.label for task in queue.drop_ready()] == ["large"]


def test_progress_counts_what_runs_is_done_and_failed(make_case, tmp_path):
    seen = []
    pool = ScriptedPool(b=[TaskResult(verdict="mismatch", code="H040", reason="wrong")])
    cases = [make_case("a"), make_case("b"), make_case("c")]
    run(cases, tmp_path / "out", pool, progress=lambda *told: seen.append(told))
    assert seen == [
        ("goldens: 0 running, 0 failed", 0, 3), ("cases: 0 running, 1 failed", 2, 3),
        ("cases: 0 running, 1 failed", 3, 3),
    ]  # fmt: skip
