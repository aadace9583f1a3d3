"""A process that has imported torch, from which the processes of both versions are forked.

Two processes that are started by themselves run the same code at speeds that differ by some percent for as long as they
live: names have other hashes, libraries other addresses (Mytkowicz et al. 2009). Forks of one process share these, and
need a tenth of the time to start. Run as a file: nothing of `harness` is imported here, since each version has its own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

_NUM_FILES = 3


def serve(orders: socket.socket, modules: Sequence[str]) -> None:
    """Import modules, then fork a process for each order until the socket is closed.

    An order is one byte with the standard files of the new process. The first line of its input says what it runs.
    """
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise every collection would walk through torch's objects and copy their pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for children that end
    while True:
        order, files, _, _ = socket.recv_fds(orders, 1, _NUM_FILES)
        if not order:
            return
        if os.fork() == 0:
            orders.close()
            _become(files)
        for file in files:
            os.close(file)


def _become(files: Sequence[int]) -> None:
    """Run what the input asks for, and end this process."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        _run(json.loads(sys.stdin.readline()))
        status = 0
    except BaseException:  # an interrupt, too, ends this process and no other
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(task: dict[str, Any]) -> None:
    """Run a program with a version's folder ahead on the path."""
    sys.path.insert(0, task["root"])
    os.environ["PYTHONPATH"] = os.pathsep.join(
        part for part in (task["root"], os.environ.get("PYTHONPATH", "")) if part
    )
    sys.argv = [task["program"], *task["arguments"]]
    runpy.run_path(task["program"], run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
