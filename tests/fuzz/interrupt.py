"""python -m tests.fuzz.interrupt [--runs N] [--seed S] [COMMAND ...]: commands that are killed at random moments.

Nothing half-written may read as whole, nothing that was there may be lost, nothing may stay in the folder for temporary
files that a later run does not sweep, and the same command must work afterwards. One process loads the libraries and
forks, so that a run takes no longer than its work.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork of a process whose threads have computed would wait for them

import reference_engine.cli
from harness.base.files import MARK
from harness.cli.main import main
from harness.command.interrupts import INTERRUPTED
from harness.errors import HarnessError
from harness.formats.recording import Recording
from harness.oracle.golden import PLAIN, open_golden

from ..loopback import answers, free_port, until
from .target import CHECKPOINTS, WORKLOAD

MODEL = ("--model", str(CHECKPOINTS / "qwen2-tiny"))
COMMANDS = {
    "golden": ("golden", *MODEL, *WORKLOAD, "--out", "out"),
    "cached golden": ("golden", *MODEL, *WORKLOAD),
    "record": ("record", "--golden", "golden", "--out", "out"),
    "check beside another": ("check", *MODEL, *WORKLOAD, "--schedule", "plain", "--out", "out"),
    "check": ("check", *MODEL, *WORKLOAD, "--schedule", "plain,batched", "--out", "out"),
    "fuzz": ("fuzz", "run", *MODEL, "--seconds", "2", "--out", "out"),
    "profile": ("profile", *MODEL, "--prompt-tokens", "4", "--max-new-tokens", "2", "--runs", "1", "--out", "out"),
    "suite": ("suite", "run", "case.toml", "--jobs", "1", "--out", "out"),
    "rollout": ("rollout", "rollouts.jsonl", *MODEL),
    "serve": ("serve", *MODEL, "--port", "0"),
    "load": ("server", "load", *MODEL, "--endpoint", "URL", "--rate", "8", "--num-requests", "12", "--new-tokens", "4"),
    "server check": ("server", "check", *MODEL, *WORKLOAD, "--endpoint", "URL"),
}
ENDINGS = {"fuzz": {5}, "rollout": {1}}
"""Of a run to its end, where it is not 0 alone: too short a search, and a log of nobody."""
BESIDE = "check beside another"
"""Two processes make and read one golden of one cache, and one of them is killed."""
SERVED_S = 1.0
CASE = f"""schema_version = 1
model = "{CHECKPOINTS / "qwen2-tiny"}"
schedules = ["plain", "batched"]
max_new_tokens = 2
[[requests]]
token_ids = [1, 4, 5, 6, 7]
[[requests]]
token_ids = [1, 9]
"""
ROLLOUT = {"prompt_ids": [1, 4, 5], "response_ids": [6, 7], "engine_logprobs": [-1.5, -2.5]}
STATUS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGINT: INTERRUPTED}


class Interruptions:
    """A folder with a golden in it, a server, and how long each command takes, as far as it has been tried."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self._finish("golden", ("golden", *MODEL, *WORKLOAD, "--out", "golden"), "first")
        self._seconds: dict[str, float] = {}

    def violations(self, seed: int, names: Sequence[str]) -> list[str]:
        """Interrupt one run of one of the commands; return what was wrong afterwards."""
        random = Random(seed)
        name, number = random.choice(names), random.choice(list(STATUS))
        place = self._place(f"run-{seed}")
        if name not in self._seconds:
            self._seconds[name] = self._finish(name, COMMANDS[name], f"timed-{name}")
        process, beside = self._start(COMMANDS[name], place), None
        if name == BESIDE:
            beside = self._start([*COMMANDS[name][:-1], "beside"], place, streams="beside-")
        time.sleep(random.uniform(0, 1.1 * self._seconds[name]))
        os.kill(process, number)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        err = (place / "err").read_text()
        ended = 0 if beside is None else os.waitstatus_to_exitcode(os.waitpid(beside, 0)[1])
        if ended:
            err_beside = (place / "beside-err").read_text()[-300:]
            return [f"seed {seed}, {name}, {number.name}: the other process ended with {ended}: {err_beside}"]
        violations = [*_wrong_ending(status, number, err, ENDINGS.get(name, set())), *_wrong_files(place, status)]
        if "URL" in COMMANDS[name] and not answers(f"{self.url}/health"):
            violations.append("the server does not answer any more")
        if random.random() < 0.2:
            violations += self._again(name, place)
        return [f"seed {seed}, {name}, {number.name}: {what}" for what in violations]

    def _again(self, name: str, place: Path) -> Iterator[str]:
        """Give the same command another folder: neither the cache nor what is left may be in its way."""
        for mark in (place / "tmp").glob(f"*/{MARK}"):
            os.utime(mark, (0, 0))  # a young one that is empty might belong to a process that has not locked it yet
        again = [argument if argument != "out" else "again" for argument in COMMANDS[name]]
        status = self._wait(name, self._start(again, place), place)
        if status not in {0, *ENDINGS.get(name, ())}:
            yield f"afterwards it ended with {status}: {(place / 'err').read_text()[-300:]}"
        yield from (f"never swept: {path.name}" for path in _temporary(place))

    def _place(self, name: str) -> Path:
        """Make a folder with the golden that is read, and a file that nobody may touch."""
        place = self.folder / name
        place.mkdir()
        (place / "thesis.txt").write_text("ten years")
        (place / "tmp").mkdir()
        (place / "case.toml").write_text(CASE)
        (place / "rollouts.jsonl").write_text(json.dumps(ROLLOUT))
        if name != "first":
            (place / "golden").symlink_to(self.folder / "first" / "golden")
        return place

    def _finish(self, name: str, command: Sequence[str], folder: str) -> float:
        """Run a command to its end, and return the seconds it took."""
        place, begin = self._place(folder), time.monotonic()
        status = self._wait(name, self._start(command, place), place)
        assert status in {0, *ENDINGS.get(name, ())}, (name, status, (place / "err").read_text())
        return time.monotonic() - begin

    @staticmethod
    def _wait(name: str, process: int, place: Path) -> int:
        """Return a process's exit status; a server, which would serve for ever, is ended once it has served a while."""
        if name == "serve":
            while not (place / "out.txt").exists() or not (place / "out.txt").read_text():
                time.sleep(0.05)
            time.sleep(SERVED_S)
            os.kill(process, signal.SIGINT)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        return 0 if name == "serve" and status == INTERRUPTED else status

    def _start(self, command: Sequence[str], place: Path, streams: str = "") -> int:
        """Run a command in a process of its own, in that folder, with the folder's cache."""
        process = os.fork()
        if process:
            return process
        status = 1
        try:
            os.chdir(place)
            os.environ |= {"HARNESS_CACHE": str(place / "cache"), "TMPDIR": str(place / "tmp")}
            tempfile.tempdir = None  # which the parent has found already
            for stream, file in ((1, "out.txt"), (2, "err")):
                os.dup2(os.open(f"{streams}{file}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = ["program", *(self.url if word == "URL" else word for word in command)]
            reference_engine.cli.main() if command[0] == "serve" else main()
        except SystemExit as end:
            status = int(end.code or 0)
        except KeyboardInterrupt:  # before or after what `main` does
            status = INTERRUPTED
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _wrong_ending(status: int, number: signal.Signals, err: str, endings: Collection[int]) -> Iterator[str]:
    early = {-signal.SIGTERM, -signal.SIGINT, INTERRUPTED}  # before the command had begun to listen
    if status not in {0, STATUS[number], *early, *endings}:
        yield f"exit status {status}: {err[-300:]}"
    if "Traceback" in err or "H099" in err:
        yield f"said: {err[-600:]}"


def _wrong_files(place: Path, status: int) -> Iterator[str]:
    if (place / "thesis.txt").read_text() != "ten years":
        yield "a file that was there is another"
    for manifest in place.rglob("manifest.json"):
        if not any(part.startswith(".making-") for part in manifest.parts):
            yield from _not_whole(manifest.parent)
    page = place / "out" / "report.html"
    if page.exists() and not page.read_text().rstrip().endswith("</html>"):
        yield "half a page"
    was_killed = status == -signal.SIGKILL
    if not was_killed and status != 0:
        left = [path for path in place.rglob("*") if path.name.startswith((".making-", ".writing-"))]
        left += _temporary(place)
        unfinished = [path.parent for path in place.rglob("step-*") if not (path.parent / "manifest.json").exists()]
        yield from (f"left behind: {path.relative_to(place)}" for path in (*left, *unfinished))


def _temporary(place: Path) -> list[Path]:
    """Return what is in the folder for temporary files, but for the cache that torch keeps there."""
    return [path for path in (place / "tmp").iterdir() if not path.name.startswith("torchinductor")]


def _not_whole(folder: Path) -> Iterator[str]:
    """What reads as a recording or a golden must be one to its last byte."""
    try:
        with Recording.open(folder) as recording:
            is_golden = recording.manifest.producer.name == "harness.oracle"
        if not is_golden:
            return
        golden = open_golden(folder)
        if golden.info is None or not (golden.noise or golden.info.key["truth"] == PLAIN):
            yield f"{folder.name} reads as a golden and lacks a part"
    except HarnessError as error:
        yield f"{folder.name} reads as whole and is not: {error}"


def interrupted(runs: int, seed: int, names: Sequence[str] = tuple(COMMANDS)) -> list[str]:
    """Interrupt so many runs; return what was wrong."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name, ExitStack() as stack:
        url = f"http://127.0.0.1:{free_port()}"
        serve = [sys.executable, "-m", "reference_engine", "serve", *MODEL, "--port", url.rpartition(":")[2]]
        server = stack.enter_context(subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        stack.callback(server.kill)
        until(lambda: answers(f"{url}/health"), what="the server answers")
        trials, violations = Interruptions(Path(name), url), []
        for index in range(runs):
            violations += (new := trials.violations(seed + index, names))
            print(*new, sep="\n", end="\n" if new else "", flush=True)
    return violations


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="*", metavar="COMMAND", default=list(COMMANDS), help="[default: all]")
    options = parser.parse_args()
    violations = interrupted(options.runs, options.seed, options.names)
    print(f"{options.runs} interrupted runs, {len(violations)} violations")
    sys.exit(1 if violations else 0)
