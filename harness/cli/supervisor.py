"""A command runs in a process of its own, whose parent gives its exit status: no engine can end it without a verdict.

Some commands run an engine in the command's own process (`fuzz`, `profile`, `check --engine-timeout 0`). An
engine there can end the process in ways that Python cannot catch: `os._exit(0)`, a C library's `exit`, a crash. So the
command says its exit status to its parent when its result is written, and the parent believes nothing else.
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NoReturn, Protocol

from harness.base.memory import collect_rarely
from harness.engines.process import how_it_ended
from harness.engines.worker import die_with_the_parent
from harness.errors import Code, HarnessError

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that the parent passes on; it ends when the command has ended by them."""
FAREWELL_S = 30.0
"""Time that a process whose result is written gets to end: an engine's threads and exit handlers may hang."""
_POLL_S = 0.25
_SENT_BY_THE_KERNEL = 128  # SI_KERNEL: of a terminal, whose whole foreground group has got it


class Process(Protocol):
    """The process of a command."""

    pid: int
    hears_the_terminal: bool
    """Whether a terminal sends its signals to the process, too."""

    def ended(self) -> int | None:
        """Return the exit status, or a signal's number with a minus; None while the process runs.

        This process gets SIGCHLD when it ends.
        """


class _Child:
    """A child of this process."""

    hears_the_terminal = True

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def ended(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


def supervise(command: Callable[[], int], begin: Callable[[int, int], Process | None]) -> int:
    """Run a command in a process of its own and return the exit status that it gave.

    Args:
        command: returns its exit status when its result is written. All of `FORWARDED` are blocked around it: it
            unblocks them while it listens.
        begin: has another process run the command by `run_supervised`; None: it is run in a child of this one.

    Raises:
        SystemExit: in the process of the command, at its end.
        HarnessError: NO_VERDICT: the process ended and gave none.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()  # or both processes would write what is in the buffer
    verdict, giving = os.pipe()
    lifeline, alive = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    process = begin(giving, lifeline)
    if process is None:
        process = _Child(os.fork())
        if not process.pid:
            os.close(alive)
            run_supervised(command, giving, lifeline, mask=mask)
    os.close(lifeline)
    os.close(giving)
    os.set_blocking(verdict, False)
    return _Supervised(process, verdict).status()


def run_supervised(command: Callable[[], int], giving: int, lifeline: int, *, mask: Collection[int]) -> NoReturn:
    """Run a command in this process, which ends with it or with its supervisor.

    Args:
        command: see `supervise`.
        giving: pipe to the supervisor for the exit status.
        lifeline: pipe of which the supervisor has the other end.
        mask: signals that stay blocked, besides `FORWARDED`.

    Raises:
        SystemExit: at the end.
    """
    die_with_the_parent(lifeline, owner=os.getpid())
    signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, *FORWARDED})
    collect_rarely()
    status = command()
    os.write(giving, f"{os.getpid()} {int(status)}\n".encode())
    gc.freeze()  # or the interpreter would search all objects once more at its end
    sys.exit(status)


class _Supervised:
    """The command's process, as its supervisor sees it."""

    def __init__(self, process: Process, verdict: int) -> None:
        self._process, self._verdict, self._said = process, verdict, b""

    def status(self) -> int:
        """Wait for the end, passing signals on, and return the exit status."""
        ended, given_at = None, None
        while ended is None:
            self._pass_on_a_signal()
            ended = self._process.ended()
            status = self._reported_status()
            if status is not None:
                given_at = given_at or time.monotonic()
                if time.monotonic() - given_at > FAREWELL_S:
                    os.kill(self._process.pid, signal.SIGKILL)
                    return status
        status = self._reported_status()
        if status is not None:
            return status
        if -ended in FORWARDED:
            return 128 - ended
        raise HarnessError(
            Code.NO_VERDICT,
            f"the process of the command ended {how_it_ended(ended)} and gave no verdict",
            where="harness",
            expected="a result on standard output",
            actual="none",
            hint="an engine that runs in this process has ended it, or the system has, for lack of memory",
        )

    def _pass_on_a_signal(self) -> None:
        """Wait for a signal; one that a terminal sent may have reached the command as well."""
        told = signal.sigtimedwait({*FORWARDED, signal.SIGCHLD}, _POLL_S)
        if told is None or told.si_signo not in FORWARDED:
            return
        if told.si_code != _SENT_BY_THE_KERNEL or not self._process.hears_the_terminal:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, told.si_signo)

    def _reported_status(self) -> int | None:
        """Return the exit status that the command gave; a copy of it that an engine has made by `fork` gives none."""
        with suppress(BlockingIOError):
            self._said += os.read(self._verdict, 4096)
        for line in self._said.decode(errors="replace").splitlines():
            pid, _, status = line.partition(" ")
            if pid == str(self._process.pid) and status.isdecimal():
                return int(status)
        return None
