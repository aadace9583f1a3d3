"""The engine's own process: it opens the engine and records runs of it, one JSON line a job.

Started by `EngineProcess`, with the number of the pipe that tells of the parent's end.
"""

import fcntl
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.base.files_read import LEFT_OUT, files_read, watch_files
from harness.engines.adapter import Engine, TapMatcher, engine_errors, open_engine, shown_settings
from harness.errors import HarnessError
from harness.formats.taps import Graph


def main() -> None:
    """Open an engine and run it, as jobs on standard input say, until it ends."""
    if LEFT_OUT in os.environ:
        watch_files()
    serve(_Worker().answer)


def serve(answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Answer jobs on standard input until it ends, and die with the parent."""
    die_with_the_parent(int(sys.argv[2]), owner=-os.getpgrp())
    with os.fdopen(os.dup(0)) as jobs, os.fdopen(os.dup(1), "w") as answers:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what the engine reads is no job,
        os.dup2(2, 1)  # and what it prints no answer
        for line in jobs:
            answers.write(json.dumps(answer(json.loads(line))) + "\n")
            answers.flush()


def die_with_the_parent(lifeline: int, *, owner: int) -> None:
    """Have the kernel kill `owner` when the parent's end of the pipe is closed, whatever runs here.

    Args:
        lifeline: the end of a pipe that is never written to; only the parent has the other end.
        owner: number of this process, or of its group with a minus.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, owner)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    try:
        is_closed = not os.read(lifeline, 1)
    except BlockingIOError:
        is_closed = False
    if is_closed:
        os._exit(1)


class _Worker:
    """Holds the engine between jobs."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Do a job and return its result."""
        try:
            with engine_errors(job["engine"]):
                result = self._do(job)
        except HarnessError as error:
            if os.environ.get("HARNESS_TRACEBACK"):
                traceback.print_exc()
            return {"error": _as_json(error), **_files_read()}
        assert self._engine is not None
        return {"name": self._engine.name, "capabilities": asdict(self._engine.capabilities), **result, **_files_read()}

    def _do(self, job: Mapping[str, Any]) -> dict[str, Any]:
        if "open" in job:
            self._open(**job["open"])
        elif "settings" in job:
            return {"settings": asdict(shown_settings(job["engine"], self._engine))}
        elif "match" in job:
            self._match(job["match"])
        else:
            self._run(job["run"])
        return {}

    def _match(self, graph: Mapping[str, Any]) -> None:
        engine: object = self._engine
        if isinstance(engine, TapMatcher):
            engine.match_taps(Graph.from_json(graph))

    def _open(
        self, name: str, folder: str, dtype: str, device: str, options: dict[str, str], adapter: str | None
    ) -> None:
        path = Path(folder)
        self._engine = open_engine(name, path, dtype=dtype, device=device, options=options, adapter=adapter)

    def _run(self, description: Mapping[str, Any]) -> None:
        from harness.engines.record import RunDescription, record

        assert self._engine is not None
        record(self._engine, RunDescription.from_json(description))


def _files_read() -> dict[str, Any]:
    return {"files_read": files_read()} if LEFT_OUT in os.environ else {}


def _as_json(error: HarnessError) -> dict[str, Any]:
    texts = {"where": error.where, "expected": error.expected, "actual": error.actual, "hint": error.hint}
    return {"code": error.code.value, "what": error.what} | {
        name: None if value is None else str(value) for name, value in texts.items()
    }
