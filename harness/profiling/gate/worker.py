"""One version of an engine in a process of its own, as the process that times it sees it."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.profiling.gate import fork_server, step_worker
from harness.profiling.gate.versions import Version, last_line

_SERVER, _PROGRAM = Path(fork_server.__file__), Path(step_worker.__file__)
SHARED = ("numpy", "safetensors", "torch", "torch.nn.attention.bias")
"""Modules that engines import and that no version is read from; the last, torch's compiler, takes longest."""
PhaseSeconds = dict[str, dict[str, float]]
"""CPU and wall seconds (`cpu`, `wall`) of each phase."""


class ForkServer:
    """The process that the workers of both versions are forked from."""

    def __init__(self, modules: Sequence[str] = SHARED) -> None:
        self._orders, theirs = socket.socketpair()
        # -P: or the server's own folder would stand ahead of the packages
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SERVER), str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # forks that hang, too
        self._process.wait()

    def start(self, files: Sequence[int]) -> None:
        """Fork a process with these standard files.

        Raises:
            OSError: the server has ended.
        """
        socket.send_fds(self._orders, [b"x"], files)


class Worker:
    """A process that has loaded one version."""

    def __init__(self, server: ForkServer, version: Version, spec: Mapping[str, Any]) -> None:
        self.version = version
        self.sources: dict[str, list[str]] = {}
        """Of each package the file that is imported, and a digest of its code."""
        self.num_threads = 1
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        stdin, requests = os.pipe()
        answers, stdout = os.pipe()
        self._requests, self._answers = os.fdopen(requests, "w"), os.fdopen(answers)
        try:
            server.start([stdin, stdout, self._errors.fileno()])
        finally:
            os.close(stdin)
            os.close(stdout)
        task = {"root": str(version.root), "program": str(_PROGRAM), "arguments": [json.dumps(spec)]}
        self._send(json.dumps(task))

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the process end, and wait for that: what it still does would be timed in the next one."""
        with suppress(BrokenPipeError):
            self._requests.close()
        if kind is None:
            self._answers.read()
        self._answers.close()
        self._errors.close()

    def wait_until_loaded(self) -> None:
        """Wait for the engine.

        Raises:
            HarnessError: ENGINE_FAILED.
        """
        found = self._answer()
        self.sources, self.num_threads = found["sources"], found["threads"]

    def run(self) -> PhaseSeconds:
        """Run the load once and return the seconds of each phase."""
        times: PhaseSeconds = self._ask("run")
        return times

    def _ask(self, what: str) -> Any:
        self._send(what)
        return self._answer()

    def _send(self, what: str) -> None:
        try:
            self._requests.write(f"{what}\n")
            self._requests.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _answer(self) -> Any:
        answer = self._answers.readline()
        if not answer:
            raise self._failure()
        return json.loads(answer)

    def _failure(self) -> HarnessError:
        self._errors.seek(0)
        what = f"the engine does not run in this version: {last_line(self._errors.read())}"
        hint = "a version that can profile, too; where it has compiled code, its wheel"
        return HarnessError(Code.ENGINE_FAILED, what, where=self.version.label, hint=hint)
