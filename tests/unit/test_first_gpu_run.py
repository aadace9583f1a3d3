"""make first-gpu-run: goes on, ends what hangs, keeps every result, and stops at no failure."""

import importlib.util
import shutil
import sys
import tarfile
import time

import pytest

from tests.first_gpu_run.__main__ import main, run_steps
from tests.first_gpu_run.archive import NAME, pack, unpack
from tests.first_gpu_run.steps import PRETENDED_STEPS, STEPS, Step
from tests.first_gpu_run.work import NOT_STARTED, TOO_LONG, kept_result


def step(name, *programs, limit_s=20, usual_s=0, needs=""):
    commands = tuple((sys.executable, "-c", program) for program in programs)
    return Step(name=name, usual_s=usual_s, limit_s=limit_s, commands=commands, needs=needs)


def test_a_failure_stops_nothing_and_what_is_done_is_not_done_again(tmp_path):
    counted = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    steps = [step("first", counted), step("second", "raise SystemExit(3)", counted), step("third", "print('figures')")]
    assert not run_steps(steps, tmp_path, budget_s=60)
    assert [kept_result(item.name, tmp_path).statuses for item in steps] == [(0,), (3, 0), (0,)]
    assert not run_steps(steps, tmp_path, budget_s=60)
    assert (tmp_path / "count").read_text() == "xxx", "the failed step is tried again, with all its commands"
    summary = (tmp_path / "summary.md").read_text()
    assert "| second | status 3, ok |" in summary
    assert "figures" in summary


@pytest.mark.slow
def test_what_hangs_is_ended_with_its_children(tmp_path):
    late = tmp_path / "late"
    child = f"import time; time.sleep(3); open({str(late)!r}, 'w')"
    hangs = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    assert not run_steps([step("hangs", hangs, limit_s=1.5)], tmp_path, budget_s=60)
    assert kept_result("hangs", tmp_path).statuses == (TOO_LONG,)
    time.sleep(3)
    assert not late.exists()


def test_a_step_without_its_usual_time_waits_for_the_next_call(tmp_path):
    steps = [step("long", "pass", usual_s=100), step("short", "pass")]
    assert not run_steps(steps, tmp_path, budget_s=50)
    assert kept_result("long", tmp_path) is None
    assert kept_result("short", tmp_path).is_done
    assert "| long | not run |" in (tmp_path / "summary.md").read_text()
    assert run_steps(steps, tmp_path, budget_s=200)


def test_a_program_that_is_not_there_leaves_its_step_out(tmp_path):
    assert run_steps([step("tool", "raise SystemExit(1)", needs="no-such-tool")], tmp_path, budget_s=60)
    assert "| tool | no-such-tool is not here |" in (tmp_path / "summary.md").read_text()


def test_a_command_that_does_not_start(tmp_path):
    nowhere = Step(name="nowhere", usual_s=0, limit_s=5, commands=(("/no/such/program",),))
    assert not run_steps([nowhere], tmp_path, budget_s=60)
    assert kept_result("nowhere", tmp_path).statuses == (NOT_STARTED,)


def test_a_result_that_was_cut_off_is_none(tmp_path):
    (tmp_path / "first.json").write_text('{"name": "first", "statu')
    assert kept_result("first", tmp_path) is None


def test_an_archive_goes_on_elsewhere(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    run_steps([step("first", "print('one')")], here, budget_s=60)
    with tarfile.open(here / NAME) as archive:
        assert sorted(archive.getnames()) == ["first-0.txt", "first.json", "summary.md"]
    unpack(here / NAME, there)
    assert kept_result("first", there) == kept_result("first", here)
    pack(there)
    with tarfile.open(there / NAME) as archive:
        assert len(archive.getnames()) == 3


def test_each_step_has_its_name_and_fits_into_a_call():
    assert len({item.name for item in STEPS}) == len(STEPS)
    assert all(item.usual_s <= item.limit_s <= 560 for item in STEPS)
    names = [item.name for item in STEPS]
    assert names[: len(PRETENDED_STEPS)] == [item.name for item in PRETENDED_STEPS]


def test_two_calls_of_ten_minutes_hold_what_is_worth_most():
    """Decode, peers, a real size, graphs, a search, the sanitizer, and a profile that is read back."""
    until_profile = STEPS[: [item.name for item in STEPS].index("profile") + 1]
    assert sum(item.limit_s for item in until_profile) <= 2 * 560


def test_an_unknown_step_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--only", "bench-9b"])
    assert ended.value.code == 2
    assert "bench-9b" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the pretended device is compiled")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_it_runs_whole_on_the_pretended_device(tmp_path):
    is_unfinished = main([str(tmp_path), "--pretended", "--budget", "3000"])
    assert not is_unfinished, (tmp_path / "summary.md").read_text()
