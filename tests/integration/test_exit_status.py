"""Exit 0 comes only from a process that printed its verdict, whatever an engine in it does, and under every signal."""

import os
import signal
import time
from pathlib import Path

import pytest

from .commands import ENGINE
from .processes import Commands
from .test_isolated_engines import is_running, wait_until

RUN = "self.inner.run(workload, Between(writer))"


@pytest.fixture(scope="module")
def commands():
    started = Commands()
    yield started
    started.close()


@pytest.fixture
def run_in_process(commands, install, tmp_path, llama):
    """Run a command on a foreign engine whose source is given, and return status, output and errors."""

    def call(source, *arguments):
        name = install(source)
        return commands.start(
            [*arguments, "--model", llama, "--engine", name], tmp_path, path=[tmp_path / "site-foreign"]
        ).end()

    return call


COMMANDS = {
    "fuzz": ["fuzz", "run", "--seconds", "2"],
    "invariance": ["fuzz", "invariance", "--seconds", "1"],
    "profile": ["profile", "--out", "kept", "--quick", "--prompt-tokens", "4", "--max-new-tokens", "3"],
    "check": ["check", "--engine-timeout", "0", "--token-ids", "1,2,3"],
    "record": ["record", "--engine-timeout", "0", "--token-ids", "1,2,3", "--out", "kept"],
}
AT_OPENING = ENGINE.replace("    return Engine(", "    {does}\n    return Engine(")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_an_engine_that_ends_the_process_gives_no_verdict(run_in_process, command):
    status, out, err = run_in_process(AT_OPENING.format(does="import os; os._exit(0)"), *COMMANDS[command])
    assert (status, out) == (2, "")
    assert err.startswith("H146: the process of the command ended with exit status 0 and gave no verdict\n")


ENDS = {
    "in a thread": "import os, threading; threading.Timer(0.3, os._exit, (0,)).start()",
    "by a C library": "import ctypes; ctypes.CDLL(None).exit(0)",
    "by a crash": "import os; os.abort()",
    "by SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "as a daemon": "import os; os.fork() and os._exit(0)",
    "at exit, first": "import atexit, os; atexit.register(os._exit, 0); os._exit(0)",
}


@pytest.mark.parametrize("how", ENDS)
def test_every_way_to_end_the_process_is_seen(run_in_process, how):
    status, _, err = run_in_process(AT_OPENING.format(does=ENDS[how]), *COMMANDS["check"])
    assert status == 2
    assert "gave no verdict" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "does",
    [
        "import atexit, os; atexit.register(os._exit, 0)",
        "import sys; sys.exit = lambda *_: None",
        "import io, sys; sys.stdout = io.StringIO()",
        "import os; os.close(1)",
        "import os, sys; os.dup2(os.open(os.devnull, os.O_WRONLY), 1)",
        "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()",
    ],
)
def test_what_an_engine_does_to_the_end_changes_no_verdict(run_in_process, does):
    status, out, _ = run_in_process(AT_OPENING.format(does=does), *COMMANDS["check"])
    assert (status, out.partition(" ")[0]) == (0, "PASS")


@pytest.mark.slow
def test_a_mismatch_stays_one_where_an_exit_handler_says_0(run_in_process):
    source = AT_OPENING.format(does="import atexit, os; atexit.register(os._exit, 0)")
    source = source.replace(RUN, "pass")
    status, out, _ = run_in_process(source, *COMMANDS["check"])
    assert (status, out.partition(" ")[0]) == (1, "MISMATCH")


SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGQUIT: 131}
LONG = {
    "fuzz": ["fuzz", "run", "--seconds", "600"],
    "invariance": ["fuzz", "--invariance", "--seconds", "600"],
    "check": ["check", "--schedule", "plain", "--max-new-tokens", "200", "--token-ids", "1,2,3", "--out", "kept"],
    "golden": ["golden", "--max-new-tokens", "200", "--token-ids", "1,2,3", "--out", "kept"],
    "profile": ["profile", "--out", "kept", "--runs", "500"],
    "faults": ["faults"],
    "suite": ["suite", "case.toml"],
    "bench": ["bench", "engine", "--repeats", "99"],
}
CASE = """
schema_version = 1
model = "{model}"
engine = "hf"
max_new_tokens = 200
[[requests]]
token_ids = [1, 2, 3]
"""


BY_SIGNAL = [(command, signal.SIGTERM) for command in LONG] + [
    (command, number) for command in ("fuzz", "check") for number in SIGNALS if number != signal.SIGTERM
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("command", "number"), BY_SIGNAL)
def test_a_signal_ends_a_command_with_its_own_status(commands, tmp_path, llama, command, number):
    (tmp_path / "case.toml").write_text(CASE.format(model=llama))
    model = [] if command in ("suite", "faults", "bench") else ["--model", llama]
    running = commands.start([*LONG[command], *model], tmp_path, HARNESS_CACHE=str(tmp_path / "cache"))
    time.sleep(1.5)
    os.kill(running.pid, number)
    status, out, err = running.end()
    assert status == SIGNALS[number], (out, err)
    assert "Traceback" not in err
    assert "NOTHING FOUND" not in out
    if number != signal.SIGQUIT:
        left = [path for path in tmp_path.rglob("*") if path.name.startswith((".making-", ".writing-"))]
        unfinished = [path for path in tmp_path.rglob("step-*") if not (path.parent / "manifest.json").exists()]
        assert not [*left, *unfinished]


def test_a_signal_to_the_whole_group_interrupts_once(commands, tmp_path, llama):
    running = commands.start(["fuzz", "run", "--seconds", "600", "--model", llama], tmp_path)
    time.sleep(1.5)
    os.killpg(running.pid, signal.SIGTERM)
    status, out, err = running.end()
    assert (status, err) == (143, "interrupted\n")
    assert out.startswith("NOTHING CHECKED") or out == ""


@pytest.mark.slow
def test_a_signal_that_is_not_heard_changes_nothing(commands, tmp_path, llama):
    running = commands.start(["check", "--model", llama, "--token-ids", "1,2,3"], tmp_path)
    time.sleep(0.2)
    os.kill(running.pid, signal.SIGPIPE)
    status, out, _ = running.end()
    assert (status, out.partition(" ")[0]) == (0, "PASS")


def test_the_command_ends_with_its_parent(commands, tmp_path, llama):
    running = commands.start(["fuzz", "run", "--seconds", "600", "--model", llama], tmp_path)
    time.sleep(1.0)
    (child,) = map(int, Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split())
    os.kill(running.pid, signal.SIGKILL)
    assert running.end()[0] == -signal.SIGKILL
    assert wait_until(lambda: not is_running(child), 20)


def test_a_search_without_time_has_checked_nothing(harness, llama):
    ran = harness("fuzz", "run", "--model", llama, "--seconds", "0.001")
    assert ran.status == 5
    assert ran.out.startswith("NOTHING CHECKED")
    assert "no workload reached decode" in " ".join(ran.out.split())
