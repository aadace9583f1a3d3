"""The command as a process of its own, and the ways in which it is cut short."""

import os
import signal
import subprocess
import sys
import time

import pytest

from harness.errors import Code, HarnessError

from .commands import listen_to_ctrl_c

HARNESS = [sys.executable, "-c", "from harness.cli import main; main()"]


def test_the_exit_status_and_both_streams_of_a_process(tmp_path):
    command = [*HARNESS, "inspect", str(tmp_path), "--format", "json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 2
    assert ran.stderr.startswith("H001: ")
    assert '"code": "H001"' in ran.stdout
    assert "Traceback" not in ran.stderr


def test_ctrl_c_ends_a_process_quietly_and_leaves_nothing_behind(tmp_path):
    environment = {**os.environ, "HARNESS_CACHE": str(tmp_path / "cache")}
    command = [*HARNESS, "check", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=listen_to_ctrl_c
    )
    deadline = time.monotonic() + 600
    while not (tmp_path / "out").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert (out, err) == ("", "interrupted\n")
    assert not (tmp_path / "out").exists()


INTERRUPTED_WHERE_NOTHING_IS_RAISED = """
import os, signal, sys, threading, time
import harness.cli
start = threading.Thread.start
threading.Thread.start = lambda thread: (start(thread), time.sleep({late_s}))  # a machine that is busy
command = sys.modules["harness.cli.main"]  # `harness.cli.main` is the function
class Group:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})
        for _ in range(1_000_000):
            pass
def run(arguments):
    try:
        group = Group()
        del group
        time.sleep(3600)
    except KeyboardInterrupt:
        return 130
    return 0
command.run = run
command.main()
"""


@pytest.mark.parametrize(("name", "status", "late_s"), [("SIGINT", 130, 0.0), ("SIGTERM", 143, 0.3)])
def test_an_interrupt_that_python_would_lose_ends_the_process_all_the_same(name, status, late_s):
    source = INTERRUPTED_WHERE_NOTHING_IS_RAISED.format(name=name, late_s=late_s)
    ran = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=600, preexec_fn=listen_to_ctrl_c
    )
    assert (ran.returncode, ran.stderr) == (status, "")


INTERRUPT_THAT_BECOMES_AN_ERROR = """
import os, signal, sys
import harness.cli
command = sys.modules["harness.cli.main"]
def run(arguments):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        return {status}
command.run = run
command.main()
"""


@pytest.mark.parametrize(("status", "shown"), [(1, 1), (2, 143), (3, 143), (5, 5)])
def test_an_interrupt_that_c_made_an_error_of_is_no_error(status, shown):
    source = INTERRUPT_THAT_BECOMES_AN_ERROR.format(status=status)
    ran = subprocess.run([sys.executable, "-c", source], timeout=600, preexec_fn=listen_to_ctrl_c, check=False)
    assert ran.returncode == shown


def test_no_space_for_the_output():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        ran = subprocess.run([*HARNESS, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
    assert ran.returncode == 2
    assert ran.stderr == "H031: standard output cannot be written: No space left on device\n"


def test_a_reader_that_goes_away_changes_nothing():
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run([*HARNESS, "--version"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (0, "")


class Interrupting:
    """A field of a class that is being made when Ctrl-C is pressed."""

    def __set_name__(self, owner, name):
        raise KeyboardInterrupt


def of_an_interrupt():
    """Return what Python makes of such an interrupt: before 3.12 a RuntimeError."""
    try:
        type("Made", (), {"field": Interrupting()})
    except (RuntimeError, KeyboardInterrupt) as error:
        return error


@pytest.mark.parametrize(("raised", "status", "words"), [
    (KeyboardInterrupt(), 130, "interrupted"),
    (of_an_interrupt(), 130, "interrupted"),
    (RuntimeError("what nobody foresaw"), 3, "H099: RuntimeError: what nobody foresaw"),
    (RecursionError(), 3, "H099: RecursionError"),
    (HarnessError(Code.NO_DEVICE, "gone"), 2, "H016: gone"),
])  # fmt: skip
def test_whatever_a_command_raises_ends_it_with_a_status(harness, monkeypatch, tmp_path, raised, status, words):
    def fail(*_args: object) -> None:
        raise raised

    monkeypatch.setattr("harness.judge.jobs.check._run_plan", fail)
    ran = harness("check", "--out", tmp_path / "out")
    assert (ran.status, ran.out) == (status, "")
    assert ran.err.startswith(words)
    assert not (tmp_path / "out").exists()


def test_an_internal_error_is_json_too(harness, monkeypatch):
    monkeypatch.setattr("harness.judge.jobs.check._run_plan", lambda *_args: 1 / 0)
    ran = harness("check", "--format", "json")
    assert ran.status == 3
    assert ran.json["error"]["code"] == Code.INTERNAL
    assert "HARNESS_TRACEBACK=1" in ran.json["error"]["hint"]


def test_the_traceback_is_shown_to_who_asks_for_it(capsys, monkeypatch):
    from harness.cli.main import run

    monkeypatch.setattr("harness.judge.jobs.check._run_plan", lambda *_args: 1 / 0)
    monkeypatch.setenv("HARNESS_TRACEBACK", "1")
    assert run(["check"]) == 3
    assert "Traceback (most recent call last)" in capsys.readouterr().err
