"""Commands in processes of their own, quickly: one process loads the libraries, and a fork of it runs each command."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SERVER = """
import json, os, signal, sys
import harness.api.calls, harness.judge.jobs.check
import harness.profiling.profile, harness.report.page.html
from harness.cli import main, supervisor
supervisor.FAREWELL_S = 3.0
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.chdir(job["folder"])
        os.environ.update(job["variables"])
        sys.path[:0] = job["path"]
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):  # which `nohup pytest` ignores
            signal.signal(number, signal.SIG_DFL)
        sys.argv = ["harness", *job["arguments"]]
        status = 99
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A command that runs."""

    pid: int
    folder: Path
    server: "subprocess.Popen[str]"

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return exit status (a signal's number with a minus), output and errors."""
        assert self.server.stdout is not None
        status = int(self.server.stdout.readline())
        return status, (self.folder / "out").read_text(), (self.folder / "err").read_text()


class Commands:
    """The process that forks."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip

    def start(
        self, arguments: Sequence[object], folder: Path, *, path: Sequence[Path] = (), **variables: str
    ) -> Running:
        """Start a command in a folder, with more places to import from; one at a time."""
        job: Mapping[str, object] = {
            "arguments": list(map(str, arguments)), "folder": str(folder), "path": list(map(str, path)),
            "variables": variables,
        }  # fmt: skip
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return Running(pid=int(self._server.stdout.readline()), folder=folder, server=self._server)

    def close(self) -> None:
        """End it."""
        self._server.send_signal(signal.SIGKILL)
        self._server.communicate()
