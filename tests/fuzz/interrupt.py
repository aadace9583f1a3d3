"""python -m tests.fuzz.interrupt [--runs N] [--seed S]: commands that are killed at random moments.

Nothing half-written may read as whole, nothing that was there may be lost, and the same command must work afterwards.
One process loads the libraries and forks, so that a run takes no longer than its work.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from harness.cli.interrupts import INTERRUPTED
from harness.cli.main import main
from harness.errors import HarnessError
from harness.formats.recording import Recording
from harness.oracle.golden import open_golden

from .targets import CHECKPOINTS, WORKLOAD

MODEL = ("--model", str(CHECKPOINTS / "qwen2-tiny"))
COMMANDS = {
    "golden": ("golden", *MODEL, *WORKLOAD, "--out", "out"),
    "cached golden": ("golden", *MODEL, *WORKLOAD),
    "run": ("run", "--golden", "golden", "--out", "out"),
    "check": ("check", *MODEL, *WORKLOAD, "--schedule", "plain,batched", "--out", "out"),
}
STATUS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGINT: INTERRUPTED}


class Interruptions:
    """A folder with a golden in it, and how long each command takes, as far as it has been tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._finish(("golden", *MODEL, *WORKLOAD, "--out", "golden"), "first")
        self._seconds: dict[str, float] = {}

    def violations(self, seed: int) -> list[str]:
        """Interrupt one run; return what was wrong afterwards."""
        random = Random(seed)
        name, number = random.choice(list(COMMANDS)), random.choice(list(STATUS))
        place = self._place(f"run-{seed}")
        if name not in self._seconds:
            self._seconds[name] = self._finish(COMMANDS[name], f"timed-{name}")
        process = self._start(COMMANDS[name], place)
        time.sleep(random.uniform(0, 1.1 * self._seconds[name]))
        os.kill(process, number)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        found = [*_wrong_ending(status, number, (place / "err").read_text()), *_wrong_files(place, status)]
        if random.random() < 0.2:
            found += self._again(COMMANDS[name], place)
        return [f"seed {seed}, {name}, {number.name}: {what}" for what in found]

    def _again(self, command: Sequence[str], place: Path) -> Iterator[str]:
        """Give the same command another folder: neither the cache nor what is left may be in its way."""
        again = [argument if argument != "out" else "again" for argument in command]
        status = os.waitstatus_to_exitcode(os.waitpid(self._start(again, place), 0)[1])
        if status != 0:
            yield f"afterwards it ended with {status}: {(place / 'err').read_text()[-300:]}"

    def _place(self, name: str) -> Path:
        """Make a folder with the golden that is read, and a file that nobody may touch."""
        place = self.folder / name
        place.mkdir()
        (place / "thesis.txt").write_text("ten years")
        if name != "first":
            (place / "golden").symlink_to(self.folder / "first" / "golden")
        return place

    def _finish(self, command: Sequence[str], name: str) -> float:
        """Run a command to its end, and return the seconds it took."""
        place, begin = self._place(name), time.monotonic()
        status = os.waitstatus_to_exitcode(os.waitpid(self._start(command, place), 0)[1])
        assert status == 0, (place / "err").read_text()
        return time.monotonic() - begin

    @staticmethod
    def _start(command: Sequence[str], place: Path) -> int:
        """Run a command in a process of its own, in that folder, with a cache of its own."""
        process = os.fork()
        if process:
            return process
        status = 1
        try:
            os.chdir(place)
            os.environ["HARNESS_CACHE"] = str(place / "cache")
            for stream, file in ((1, "out.txt"), (2, "err")):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = ["harness", *command]
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        except KeyboardInterrupt:  # before or after what `main` does
            status = INTERRUPTED
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _wrong_ending(status: int, number: signal.Signals, err: str) -> Iterator[str]:
    early = {-signal.SIGTERM, -signal.SIGINT, INTERRUPTED}  # before the command had begun to listen
    if status not in {0, STATUS[number], *early}:
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
        unfinished = [path.parent for path in place.rglob("step-*") if not (path.parent / "manifest.json").exists()]
        yield from (f"left behind: {path.relative_to(place)}" for path in (*left, *unfinished))


def _not_whole(folder: Path) -> Iterator[str]:
    """What reads as a recording or a golden must be one to its last byte."""
    try:
        with Recording.open(folder) as recording:
            is_golden = recording.manifest.producer.name == "harness.oracle"
        if is_golden and (not (golden := open_golden(folder)).noise or golden.info is None):
            yield f"{folder.name} reads as a golden and lacks a part"
    except HarnessError as error:
        yield f"{folder.name} reads as whole and is not: {error}"


def interrupted(runs: int, seed: int) -> list[str]:
    """Interrupt so many runs; return what was wrong."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        trials = Interruptions(Path(name))
        found = [trials.violations(seed + index) for index in range(runs)]
    return [what for each in found for what in each]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    violations = interrupted(given.runs, given.seed)
    print(f"{given.runs} interrupted runs, {len(violations)} violations")
    print(*violations, sep="\n", end="")
    sys.exit(1 if violations else 0)
