"""The process of an engine: the harness sees whatever happens in it, and leaves nothing of it behind.

Of processes that an engine starts itself, the one that ended is named in the error that follows from it.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from harness.base.files_read import add_files
from harness.errors import Code, HarnessError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]) or sys.path; from {module} import main; main()"
_START_ELSEWHERE = """
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("harness", sys.argv[1])
problem = None
if sys.version_info < (3, 11):
    problem = "Python is too old", "3.11 or later", sys.version.split()[0]
elif importlib.util.find_spec("numpy") is None:
    problem = "numpy is not installed", "numpy, which the recorder writes with", None
if problem is not None:
    error = {"code": "H122", "what": "the engine's Python cannot run the recorder: " + problem[0]}
    error.update(where=sys.executable, expected=problem[1], actual=problem[2])
    input()
    print(json.dumps({"error": error}), flush=True)
    sys.exit()
sys.modules["harness"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from {module} import main
main()
"""
"""In another environment the harness alone is taken from ours: what else lies beside it must not be found there."""
_PACKAGE = Path(__file__).parents[1] / "__init__.py"
"""The harness itself, as a file."""
_POLL_S = 0.1
_FAREWELL_S = 5.0
"""Time that a process whose work is done gets to end by itself."""


class EngineProcess:
    """A Python process that answers one JSON line with another, until it is closed.

    Its standard output is our standard error: what an engine prints is not mixed into our results. It is the head of a
    process group, which is killed with it; a pipe on which nothing is ever written kills the group when this process
    ends in any way. Processes that leave the group are not known to us.
    """

    module = "harness.engines.worker"
    """The module that runs in the process: its `main` answers."""

    def __init__(
        self,
        engine: str,
        *,
        python: str = sys.executable,
        variables: Mapping[str, str] | None = None,
        brings_harness: bool = False,
    ) -> None:
        """Start the process.

        Args:
            engine: what it is for, in errors.
            python: interpreter; another one than this finds packages by itself.
            variables: put into its environment.
            brings_harness: whether the other one is given this harness, and nothing else of ours.

        Raises:
            HarnessError: BAD_ENGINE_PYTHON: the other one cannot be started.
        """
        self._engine = engine
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*self._command(python, brings_harness, variables or {}), str(lifeline)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[lifeline],
                start_new_session=True,
                env={**(_without_ours(os.environ) if brings_harness else os.environ), **(variables or {})},
            )
        except OSError as error:
            os.close(self._lifeline)
            raise HarnessError(
                Code.BAD_ENGINE_PYTHON,
                f"the engine's Python cannot be started: {error.strerror}",
                where="--engine-python",
                expected="the path of an interpreter: /path/to/environment/bin/python",
                actual=python,
            ) from error
        finally:
            os.close(lifeline)
        self._unread = b""

    def _command(self, python: str, brings_harness: bool, variables: Mapping[str, str]) -> list[str]:
        if brings_harness:
            return [python, "-c", _START_ELSEWHERE.replace("{module}", self.module), str(_PACKAGE)]
        paths = [str(Path(path).absolute()) for path in sys.path] if python == sys.executable else []
        if paths and "PYTHONPATH" in variables:  # ours replace what Python has made of it
            paths = [path for path in variables["PYTHONPATH"].split(os.pathsep) if path] + paths
        return [python, "-c", _START.format(module=self.module), json.dumps(paths)]

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def ask(self, message: Mapping[str, Any], *, doing: str, timeout_s: float | None) -> dict[str, Any]:
        """Send a message and return the answer to it.

        Args:
            message: what to do.
            doing: the same in words, for errors.
            timeout_s: longest time until the answer; None waits for ever.

        Raises:
            HarnessError: what the process answers; ENGINE_FAILED: it ended instead; ENGINE_TIMED_OUT. After an error of
                the last two kinds the process is gone.
        """
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended: the wait for its answer says how
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        try:
            answer: dict[str, Any] = json.loads(self._line(doing, timeout_s))
        except ValueError as error:
            self.kill()
            raise self._ended(doing) from error
        except BaseException:
            add_files(None, self._engine)
            self.kill()
            raise
        add_files(answer.pop("files_read", {}), self._engine)
        if "error" in answer:
            raise HarnessError(Code(answer["error"].pop("code")), answer["error"].pop("what"), **answer["error"])
        return answer

    def close(self) -> None:
        """Let the process end by itself, and see that it does."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_FAREWELL_S)
        self.kill()

    def kill(self) -> None:
        """End the process and its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _line(self, doing: str, timeout_s: float | None) -> bytes:
        """Return the next line of the process; the pipe may outlive it, in a process that it has started."""
        assert self._process.stdout is not None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            has_ended = self._process.poll() is not None
            if select.select([pipe], [], [], 0 if has_ended else _POLL_S)[0]:
                data = os.read(pipe, 1 << 16)
                self._unread += data
                if not data:
                    self._process.wait()
                    raise self._ended(doing)
            elif has_ended:
                raise self._ended(doing)
            elif deadline is not None and time.monotonic() > deadline:
                raise self._timed_out(doing, timeout_s)
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self, doing: str) -> HarnessError:
        return HarnessError(
            Code.ENGINE_FAILED,
            f"the engine's process ended {how_it_ended(self._process.returncode)} before it was done",
            where=f"{self._engine}, {doing}",
            hint="run the engine alone on the same tokens; --engine-timeout 0 runs it in the harness's own process",
        )

    def _timed_out(self, doing: str, timeout_s: float | None) -> HarnessError:
        return HarnessError(
            Code.ENGINE_TIMED_OUT,
            "the engine was not done in time, and its process was ended",
            where=f"{self._engine}, {doing}",
            expected=f"at most {timeout_s:g} s",
            hint="raise --engine-timeout, or give a smaller workload",
        )


def _without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what leads Python to our packages."""
    return {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def how_it_ended(status: int) -> str:
    """Return in words how a process ended, of its exit status; a negative one is a signal's number."""
    if status >= 0:
        return f"with exit status {status}"
    try:
        return f"by signal {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"


@contextmanager
def watched_processes(
    engine: str, processes: "Mapping[str, BaseProcess]", *, wake: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Name the process that ended, where the block raises because of it.

    Args:
        engine: in errors.
        processes: by what they are called in errors.
        wake: called once as soon as any of them has ended, also after the block: it lets the engine raise where it
            would wait for an answer without end.

    Raises:
        HarnessError: ENGINE_FAILED.
    """
    from multiprocessing.connection import wait

    names = {process.sentinel: name for name, process in processes.items()}
    first_ended: list[str] = []

    def watch() -> None:
        first_ended.append(names[wait(list(names))[0]])  # type: ignore[index]  # sentinels are what it is given
        wake()

    if names:
        Thread(target=watch, daemon=True).start()
    try:
        yield
    except Exception as error:
        if not first_ended:
            raise
        process = processes[first_ended[0]]
        process.join()
        raise HarnessError(
            Code.ENGINE_FAILED,
            f"{first_ended[0]} ended {how_it_ended(process.exitcode or 0)} before it was done "
            f"({type(error).__name__}: {error})",
            where=engine,
            expected=f"{len(processes)} process(es) that live as long as the engine",
            hint="what the process said last is on standard error; SIGKILL is often the system's, for lack of memory",
        ) from error
