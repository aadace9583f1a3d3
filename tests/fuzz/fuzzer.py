"""Gives damaged files to commands, and says what a command must never do."""

import io
import os
import re
import shutil
import signal
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import Random

from harness.cli.main import run

from .target import Target, cache_at

STATUSES = {0, 1, 2, 4, 5}
LIMIT_S, WAITING_LIMIT_S = 30, 600
"""Longest time of the processor for one input, and longest time in all, on a machine that has other work."""


class TooLongError(BaseException):
    """A command took longer than any of these may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handled:
    """How a command took a damaged input."""

    ending: str
    """The exit status, and the code of the error."""
    violations: list[str]
    """What it did that it must not."""


def fuzz(target: Target, template: Path, seed: int) -> Handled:
    """Damage a copy of the target's file, run its command, and look at what came of it.

    Args:
        target: what is damaged.
        template: folder with all sound files.
        seed: of the damage.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name) / "x"
        shutil.copytree(template, folder, copy_function=os.link)
        _damage(target, folder, Random(f"{target.name} {seed}"))
        before = _stamps(folder)
        status, out, err = _run(target, folder)
        violations = list(_wrong_with(status, out, err))
        after = _stamps(folder)
        lost = sorted(path for path, stamp in before.items() if after.get(path) != stamp)
    violations += [f"files lost or changed: {lost[:3]}"] if lost else []
    code = re.search(r"^H\d{3}", err, re.MULTILINE) if status else None
    return Handled(
        ending=f"{status} {code.group()}" if code else str(status),
        violations=[f"{target.name}, seed {seed}: {what}" for what in violations],
    )


def _damage(target: Target, folder: Path, random: Random) -> None:
    (path,) = folder.glob(target.file)
    content = path.read_bytes()
    path.unlink()  # a link to the template's
    path.write_bytes(random.choice(list(target.mutations))(content, random))
    if random.random() < 0.5:
        target.repair(folder)


def _run(target: Target, folder: Path) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    arguments = [str(argument) for argument in target.command(folder)]
    with cache_at(folder / "cache"), _limited(), redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            status = int(run(arguments))
        except BaseException:
            return -1, out.getvalue(), err.getvalue() + traceback.format_exc()
    return status, out.getvalue(), err.getvalue()


def _wrong_with(status: int, out: str, err: str) -> Iterator[str]:
    shown = (err or out)[-600:]
    if status not in STATUSES:
        yield f"exit status {status}: {shown}"
    elif "Traceback" in out + err:
        yield f"a traceback: {shown}"
    elif status == 2 and not re.search(r"^H(?!099)\d{3}: .", err, re.MULTILINE):
        yield f"no code: {shown}"
    odd = {character for character in out + err if not character.isprintable() and character not in "\n\t"}
    if odd:
        yield f"characters that a terminal obeys: {sorted(odd)}"


def _stamps(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return what changes with the content of every file but those of the cache, which may be made again."""
    stamps = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).parts[0] != "cache":
            status = path.stat()
            stamps[str(path.relative_to(folder))] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return stamps


@contextmanager
def _limited() -> Iterator[None]:
    def stop(_number: int, _frame: object) -> None:
        raise TooLongError

    numbers = signal.SIGPROF, signal.SIGALRM
    before = [signal.signal(number, stop) for number in numbers]
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.alarm(WAITING_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
