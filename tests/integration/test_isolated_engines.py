"""Engines in a process of their own: whatever happens there ends in a coded error, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.errors import Code

from .commands import ENGINE

HARNESS = [sys.executable, "-c", "from harness.cli import main; main()"]
RUN = "self.inner.run(workload, Between(writer))"
OPEN = """
import ctypes, os, signal, subprocess, sys, time
from harness.engines import Capabilities
from harness.errors import Code, HarnessError

class Engine:
    name, capabilities = "foreign", Capabilities(schedules=("plain",))

    def run(self, workload, writer):
        pass


class Odd(BaseException):
    pass


def open_engine(folder, *, dtype, device, options):
    {does}
    return Engine()
"""
"""An engine that needs no torch: what it does at opening is seen in a fraction of a second."""

ENDS = {
    "os._exit(0)": "with exit status 0 before it was done",
    "os._exit(5)": "with exit status 5 before it was done",
    "ctypes.string_at(0)": "by signal SIGSEGV",
    "os.kill(os.getpid(), signal.SIGKILL)": "by signal SIGKILL",
    "os.abort()": "by signal SIGABRT",
    "sys.exit(0)": "raised SystemExit: 0",
    "raise GeneratorExit": "raised GeneratorExit",
    "raise KeyboardInterrupt": "before it was done",
    "raise Odd('very')": "raised Odd: very",
    "raise HarnessError(Code.INTERNAL, 'not yours')": "raised HarnessError: H099: not yours",
    "raise HarnessError(Code.NOTHING_CHECKED, 'all is well')": "raised HarnessError: H051: all is well",
    "raise HarnessError(Code.PERFORMANCE_REGRESSION, 'slow')": "raised HarnessError: H078: slow",
    "return None": "actual:   NoneType",
    "Engine.capabilities = None": "the engine's capabilities have the wrong type",
    "Engine.capabilities = Capabilities(schedules='plain')": "the engine's capabilities have no list of schedules",
    "Engine.capabilities = Capabilities(schedules=('plain',), unsupported_taps='mlp.act')": (
        "the engine's capabilities have no list of unsupported_taps"
    ),
    "Engine.capabilities = property(lambda self: 1 / 0)": "raised ZeroDivisionError",
    "os.write(1, b'{}')": "cannot follow the schedule 'batched'",  # what it prints is no answer
    "sys.stdin.read()": "cannot follow the schedule 'batched'",  # nor is it given our jobs
}
SAYS_WHAT_IT_CAN_SERVE = ("os.write", "sys.stdin")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("does", ENDS)
def test_whatever_an_engine_does_is_an_error_that_names_it(harness, install, llama, does):
    name = install(OPEN.format(does=does))
    prompts = ("--token-ids", "1,2", "--token-ids", "1,4")
    ran = harness("check", "--model", llama, *prompts, "--engine", name, "--schedule", "batched")
    assert ran.status == 2
    code = Code.ENGINE_CANNOT_SERVE if does.startswith(SAYS_WHAT_IT_CAN_SERVE) else Code.ENGINE_FAILED
    assert ran.err.startswith(f"{code}: "), ran.err
    assert ENDS[does] in ran.err
    assert "foreign" in ran.err
    assert ran.out == ""


IN_PROCESS = [does for does in ENDS if does.startswith(("sys.exit", "raise", "return", "Engine.", "from"))]


@pytest.mark.parametrize("does", [does for does in IN_PROCESS if "KeyboardInterrupt" not in does])
def test_what_an_engine_raises_in_our_own_process_is_the_same_error(harness, install, llama, does):
    name = install(OPEN.format(does=does))
    ran = harness("check", "--model", llama, "--token-ids", "1,2", "--engine", name, "--engine-timeout", "0")
    assert (ran.status, ran.err.partition(":")[0]) == (2, Code.ENGINE_FAILED)
    assert ENDS[does] in ran.err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "record"])
def test_an_engine_that_ends_the_process_in_a_run_leaves_no_recording(
    harness, install, llama, golden, tmp_path, command
):
    name = install(ENGINE.replace(RUN, f"{RUN}; import os; os._exit(0)"))
    start = ["check", "--model", llama, "--token-ids", "1,2,3", "--max-new-tokens", "2"]
    start = start if command == "check" else ["record", "--golden", golden]
    out = tmp_path / "out"
    ran = harness(*start, "--schedule", "plain", "--engine", name, "--out", out, "--format", "json")
    assert ran.status == 2
    assert ran.json["error"]["code"] == Code.ENGINE_FAILED
    assert ran.json["error"]["where"] == "foreign, schedule plain"
    assert not out.exists()


def processes_of(marker: Path) -> list[int]:
    """Return the processes that wrote their number into the file and still run."""
    pids = [int(line) for line in marker.read_text().split()] if marker.exists() else []
    return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until(holds, seconds: float = 600.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(holds())


HANGS = """child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open({marker!r}, "w") as file: file.write(f"{{os.getpid()}} {{child.pid}}")
    {hang}"""
HOLDS_THE_LOCK = "ctypes.PyDLL(None).sleep(600)"
"""As a C extension that loops: no other thread of the process ever runs again."""


@pytest.mark.parametrize("hang", ["time.sleep(600)", HOLDS_THE_LOCK])
def test_an_engine_that_hangs_is_ended_with_its_children(harness, install, llama, tmp_path, hang):
    marker = tmp_path / "pids"
    name = install(OPEN.format(does=HANGS.format(marker=str(marker), hang=hang)))
    ran = harness("check", "--model", llama, "--token-ids", "1,2", "--engine", name, "--engine-timeout", "2")
    assert ran.status == 2
    assert ran.err.startswith(f"{Code.ENGINE_TIMED_OUT}: ")
    assert "foreign, opening" in ran.err
    assert wait_until(lambda: not processes_of(marker))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_engine_ends_with_the_harness(install, llama, tmp_path, number):
    marker = tmp_path / "pids"
    name = install(OPEN.format(does=HANGS.format(marker=str(marker), hang=HOLDS_THE_LOCK)))
    arguments = ["check", "--model", str(llama), "--token-ids", "1,2", "--engine", name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [*HARNESS, *arguments], env=environment, stderr=subprocess.PIPE, preexec_fn=listen_to_signals
    )
    assert wait_until(lambda: marker.exists() and len(marker.read_text().split()) == 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert err == (b"" if number == signal.SIGKILL else b"interrupted\n")
    assert wait_until(lambda: not processes_of(marker))


def listen_to_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_our_own_engine_in_a_process_of_its_own(harness, llama, workload, tmp_path):
    arguments = ["check", "--model", llama, *workload, "--schedule", "plain,batched", "--format", "json"]
    here = harness(*arguments)
    there = harness(*arguments, "--engine-timeout", "600", "--out", tmp_path / "out")
    assert (here.status, there.status) == (0, 0), there.err
    taps = [[run["taps"] for run in ran.json["runs"]] for ran in (here, there)]
    assert taps[0] == taps[1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["batched", "plain", "report.html"]


@pytest.mark.parametrize("seconds", ["-1", "inf", "nan"])
def test_a_limit_that_is_none(harness, llama, workload, seconds):
    ran = harness("check", "--model", llama, *workload, "--engine-timeout", seconds)
    assert (ran.status, ran.err.partition(":")[0]) == (2, Code.BAD_OPTION)
