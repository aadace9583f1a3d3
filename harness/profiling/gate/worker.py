"""One version of an engine in a process of its own, as the process that times it sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.profiling.gate import step_worker
from harness.profiling.gate.versions import Version, last_line

_PROGRAM = Path(step_worker.__file__)
PhaseSeconds = dict[str, dict[str, float]]
"""CPU and wall seconds (`cpu`, `wall`) of each phase."""


class Worker:
    """A process that has loaded one version."""

    def __init__(self, version: Version, spec: Mapping[str, Any]) -> None:
        self.version = version
        self.sources: dict[str, list[str]] = {}
        """Of each package the file that is imported, and a digest of its code."""
        self.num_threads = 1
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        path = os.pathsep.join(part for part in (str(version.root), os.environ.get("PYTHONPATH")) if part)
        # -P: or the worker's own folder would stand ahead of the packages
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), json.dumps(spec)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
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

    def begin_reopening(self) -> None:
        """Let it load the engine again, elsewhere in memory; `wait_until_reopened` waits for it."""
        self._send("reopen")

    def wait_until_reopened(self) -> None:
        """Wait for the engine that was to be loaded again."""
        self._answer()

    def _ask(self, what: str) -> Any:
        self._send(what)
        return self._answer()

    def _send(self, what: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{what}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise self._failure()
        return json.loads(answer)

    def _failure(self) -> HarnessError:
        self._process.wait()
        self._errors.seek(0)
        what = f"the engine does not run in this version: {last_line(self._errors.read())}"
        hint = "a version that can profile, too; where it has compiled code, its wheel"
        return HarnessError(Code.ENGINE_FAILED, what, where=self.version.label, hint=hint)
