"""One step: its commands in process groups of their own, which end with the step."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .steps import Step

ROOT = Path(__file__).parents[2]
TOO_LONG, NOT_STARTED = 124, 127
_LAST_WORDS_S = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """How a step ended; kept as NAME.json beside what its commands printed."""

    name: str
    statuses: tuple[int, ...]
    """Exit statuses: 124 where the time was over, 127 where a program is not there."""
    seconds: float
    left_out: str = ""
    """Why nothing ran."""

    @property
    def is_done(self) -> bool:
        """Whether it need not be run again."""
        return bool(self.left_out) or set(self.statuses) == {0}

    def keep(self, out: Path) -> None:
        """Write the result; until all of it is on disk there is none."""
        part = out / f".{self.name}.json"
        part.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")
        part.replace(out / f"{self.name}.json")


def kept_result(name: str, out: Path) -> StepResult | None:
    """Return the result of an earlier call; None where there is none that can be read."""
    try:
        kept = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        return StepResult(**{**kept, "statuses": tuple(kept["statuses"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def do_step(step: Step, out: Path, *, limit_s: float, environment: Mapping[str, str]) -> StepResult:
    """Run a step's commands side by side and return how they ended; nothing of them is left running."""
    if step.needs and shutil.which(step.needs) is None:
        return StepResult(name=step.name, statuses=(), seconds=0.0, left_out=f"{step.needs} is not here")
    begin = time.monotonic()
    if not step.is_timed:  # its processes share the cores
        environment = {**environment, "OMP_NUM_THREADS": "1"}
    running = [_start(command, out, f"{step.name}-{at}", environment) for at, command in enumerate(step.commands)]
    statuses = tuple(_status(process, begin + limit_s - time.monotonic()) for process in running)
    return StepResult(name=step.name, statuses=statuses, seconds=round(time.monotonic() - begin, 1))


def _start(
    command: tuple[str, ...], out: Path, name: str, environment: Mapping[str, str]
) -> subprocess.Popen[bytes] | None:
    command = tuple(part.replace("{out}", str(out)) for part in command)
    with (out / f"{name}.txt").open("w", encoding="utf-8") as log:
        print("$", *command, file=log, flush=True)
        try:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            print(error, file=log)
            return None


def _status(process: subprocess.Popen[bytes] | None, seconds: float) -> int:
    if process is None:
        return NOT_STARTED
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        _end(process)
        return TOO_LONG


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process, which may then say how far it came, and end its group."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_WORDS_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
