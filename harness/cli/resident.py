"""A process that has imported torch, transformers and the harness, and forks a process for each check.

Imports are half of the CPU time of a tiny model's check. With `HARNESS_RESIDENT=MINUTES` the first check leaves this
process behind, and later ones find it; it ends after so many minutes without a check. It is never used for anything
but what a new process would do:

- Its socket's name is a digest of all that a process inherits: interpreter, flags, environment, places to import from,
  ignored signals, limits, namespaces, user. The process computes the digest again from what it has itself: where that
  differs, no command finds it.
- It ends if a file that it has imported, or a folder to import from, was written since it began.
- It imports no engine, runs no operation of torch and opens no device. It ends where an import started a thread (other
  than those of numpy's BLAS, which ends them before a fork and starts them after it), or opened a device.

The command stays the parent that gives the exit status (`supervisor`): it sends its streams and the two pipes of
supervision, passes signals on, and its end ends the forked process.
"""

import gc
import hashlib
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "HARNESS_RESIDENT"
"""Minutes without a check after which the process ends; unset or empty: there is none."""
_IMPORTS = (
    "numpy", "torch", "torch._dynamo", "transformers.conversion_mapping", "transformers.masking_utils",
    "transformers.modeling_layers", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "harness.cli.check", "harness.plan", "harness.judge.jobs.check", "harness.judge.explain.causes",
    "harness.report.check.dtypes", "harness.report.page.html", "harness.engines.reference.engine", "rich.progress",
)  # fmt: skip
"""What most checks import; numpy first, whose BLAS alone may start threads."""
_CHANGING = {"_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES"}
"""Variables of a shell that differ from command to command, and that no import reads."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LENGTH = struct.Struct("<I")
_GO = b"\n"
"""What a command sends when it knows the number of its process; one that no longer waits runs in a child of its own."""
_WAIT_S = 60.0
_TICK_NS = 20_000_000
"""The time of a file is that of the kernel's last tick, up to 10 ms before it was written."""
_FDS = 5


class Forked:
    """The process of a command that was forked by the resident one, as its supervisor sees it."""

    hears_the_terminal = False

    def __init__(self, connection: socket.socket) -> None:
        """Read the number of the process; raises OSError if there is none."""
        self._connection, self._text = connection, b""
        while not (line := self._line()):
            if not self._read():
                raise ConnectionResetError
        self.pid = int(line)
        connection.sendall(_GO)
        connection.setblocking(False)

    def ended(self) -> int | None:
        """Return the exit status, or a signal's number with a minus; None while the process runs."""
        with suppress(BlockingIOError):
            while self._read():
                pass
            return int(self._line() or -signal.SIGKILL)  # without a line nobody is left who would say
        line = self._line()
        return int(line) if line else None

    def _read(self) -> bytes:
        text = self._connection.recv(64)
        self._text += text
        return text

    def _line(self) -> bytes:
        line, end, rest = self._text.partition(b"\n")
        self._text = rest if end else self._text
        return line if end else b""


def begin(arguments: Sequence[str], giving: int, lifeline: int) -> Forked | None:
    """Have the resident process begin a command; None if there is none, or if it is of no use.

    Args:
        arguments: of the command line.
        giving: the pipe into which the command says its exit status.
        lifeline: the pipe at whose end the command ends.
    """
    if not is_wanted(arguments):
        return None
    umask = os.umask(0o077)
    os.umask(umask)
    try:
        job = {"arguments": list(arguments), "folder": str(Path.cwd()), "umask": umask, "variables": dict(os.environ)}
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_WAIT_S)
        with _short(_socket_path()) as address:
            connection.connect(address)
        text = json.dumps(job).encode()
        socket.send_fds(connection, [_LENGTH.pack(len(text))], [0, 1, 2, giving, lifeline])
        connection.sendall(text)
        return Forked(connection)
    except (OSError, ValueError):  # none listens, or it ended; variables that are no text
        return None


def is_wanted(arguments: Sequence[str]) -> bool:
    """Whether a resident process may run a command: a check, whose imports are known."""
    wanted = os.environ.get(VARIABLE, "") not in ("", "0") and sys.platform == "linux"
    return wanted and list(arguments[:1]) == ["check"] and all(map(os.path.isabs, sys.path))


def leave_behind() -> None:
    """Start the resident process for the next command; does nothing if there is one already."""
    with suppress(OSError):
        start = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import main; main()"
        subprocess.Popen(
            [sys.executable, "-c", start, json.dumps(sys.path)], start_new_session=True, cwd="/",
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def _socket_path() -> Path:
    """Return where the process of this environment listens.

    Raises:
        OSError: the folder is not this user's alone.
    """
    folder = Path(tempfile.gettempdir()) / f"inference-harness-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(folder)
    return folder / f"{_inherited()}.socket"


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Lend a path of a file that is short enough for an address."""
    folder = os.open(path.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _inherited() -> str:
    """Return the digest of all that a new process gets from the one that starts it."""
    variables = {name: value for name, value in os.environ.items() if name not in _CHANGING}
    limits, cgroup = (Path(f"/proc/self/{name}").read_text() for name in ("limits", "cgroup"))
    namespaces = sorted(str(entry.readlink()) for entry in Path("/proc/self/ns").iterdir())
    ignored = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_IGN]  # `nohup`, `command &`
    parts = [
        sorted(variables.items()), ignored, limits, cgroup, namespaces, sorted(os.sched_getaffinity(0)), os.nice(0),
        os.getuid(), os.getgid(), os.getgroups(), sys.executable, sys.version, list(sys.flags), sys.warnoptions,
        sorted(sys._xoptions.items()), sys.path, __file__,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def main() -> None:
    """Import, then fork a process for each connection, until nothing came for `HARNESS_RESIDENT` minutes."""
    begun_ns, path = time.time_ns() - _TICK_NS, _socket_path()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a supervisor blocks some
    with path.with_suffix(".lock").open("w") as lock, suppress(BlockingIOError):
        flock(lock, LOCK_EX | LOCK_NB)
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            with _short(path) as address:
                listener.bind(address)
            inode = path.stat().st_ino
            try:
                listener.listen()
                _serve(listener, begun_ns)
            finally:
                if os.getpid() == os.getsid(0) and path.stat().st_ino == inode:
                    path.unlink()


def _serve(listener: socket.socket, begun_ns: int) -> None:
    _import_all()
    listener.settimeout(60 * float(os.environ[VARIABLE]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy every page
    imported = _imported()
    with suppress(TimeoutError):
        while max(imported.values()) < begun_ns:
            connection, _ = listener.accept()
            with connection:
                if _imported(imported) != imported:
                    return
                if _peer(connection)[1] == os.getuid() and not os.fork():
                    listener.close()
                    _run(connection)


def _import_all() -> None:
    """Import what checks import; raises RuntimeError if that starts a thread or opens a device."""
    first, *others = _IMPORTS
    import_module(first)
    before = _num_threads()
    for name in others:
        import_module(name)
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("")  # builds its table
    if _num_threads() != before or _holds_a_device():
        raise RuntimeError("an import has started a thread or opened a device, which a fork would not have")


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _holds_a_device() -> bool:
    """Whether a driver was opened: its state does not outlive a fork."""
    names = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return any(name.startswith("/dev/") and name != os.devnull for name in names)


def _imported(names: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return when each imported file, and each folder to import from, was written last, in ns."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    written = dict[str, int]()
    for name in names or {*filter(None, files), *sys.path, sys.executable}:
        with suppress(OSError):
            written[name] = Path(name).stat().st_mtime_ns
    return written


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group at the other end."""
    pid, user, group = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user, group


def _run(connection: socket.socket) -> NoReturn:
    """Fork the command's process, and tell its number and its end to the command that asked."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.settimeout(_WAIT_S)
    length, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, _FDS)
    text = bytearray()
    while len(text) < _LENGTH.unpack(length)[0]:
        if not (data := connection.recv(1 << 16)):
            os._exit(1)  # whoever asked has ended
        text += data
    pid = os.fork()
    if not pid:
        if connection.recv(1) != _GO:
            os._exit(1)
        connection.close()
        _become(json.loads(text), fds)
    for fd in fds:
        os.close(fd)
    connection.sendall(b"%d\n" % pid)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.sendall(b"%d\n" % status)
    with suppress(OSError):
        os.kill(_peer(connection)[0], signal.SIGCHLD)  # for which it waits
    os._exit(0)


def _become(job: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    """Run a command as a new process would: its streams, folder, variables and arguments."""
    from harness.cli.main import run_listening
    from harness.cli.supervisor import run_supervised

    *streams, giving, lifeline = fds
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = open(0, encoding=sys.stdin.encoding, closefd=False)  # noqa: SIM115  they stay open
    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        buffering = -1 if number == 1 else 1
        new = open(number, "w", buffering, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    os.chdir(job["folder"])
    os.umask(job["umask"])
    os.environ.clear()
    os.environ.update(job["variables"])
    import_module("numpy").random.seed()  # or every fork would draw the same numbers
    sys.argv[:] = ["harness", *job["arguments"]]
    run_supervised(lambda: run_listening(job["arguments"]), giving, lifeline, mask=set())
