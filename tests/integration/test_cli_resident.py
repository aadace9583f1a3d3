"""`HARNESS_RESIDENT`: a process that forks the next checks."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from harness.cli import resident
from harness.errors import Code, exit_status

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process is for Linux alone")
HARNESS = [sys.executable, "-c", "import sys; sys.path.pop(0); from harness.cli import main; main()"]
ENGINE = """
import os, time
def open_engine(folder, *, dtype, device, options):
    print("opened", os.environ["SHLVL"], os.getcwd(), flush=True)
    open("ready", "w").write(f"{os.getpid()} {os.getsid(0)} .")
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder to import from, and one for sockets: no other process is found."""
    folder = tmp_path_factory.mktemp("resident")
    metadata = folder / "modules" / "sleeps-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "modules" / "sleeps.py").write_text(ENGINE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sleeps\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[inference_harness.engines]\nsleeps = sleeps:open_engine\n")
    (folder / "tmp").mkdir()
    yield folder
    for path in (folder / "tmp").glob("*/*.socket"):  # it ends where something to import from has changed
        (folder / "modules" / "another.py").touch()
        connect(path)


def connect(path: Path) -> None:
    """Connect to a process that then ends without a word: it may end before it accepts, too."""
    with suppress(ConnectionError), socket.socket(socket.AF_UNIX) as connection, resident._short(path) as address:
        connection.connect(address)
        assert connection.recv(1) == b""


@pytest.fixture
def variables(place):
    changed = {"TMPDIR": str(place / "tmp"), "PYTHONPATH": str(place / "modules"), "SHLVL": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of each test another
    return {**kept, **changed, resident.VARIABLE: "5"}


def ran(*arguments: str, **options) -> "subprocess.CompletedProcess[str]":
    command = [*HARNESS, "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def processes(place: Path) -> list[Path]:
    """Wait until a process listens, and return the sockets."""
    deadline = time.monotonic() + 60
    while not (sockets := [*filter(listens, (place / "tmp").glob("*/*.socket"))]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sockets


def listens(path: Path) -> bool:
    """Whether there is a process behind a socket: one that was killed leaves it."""
    with socket.socket(socket.AF_UNIX) as connection, resident._short(path) as address:
        return connection.connect_ex(address) == 0


def session_of(process: "subprocess.Popen[str]", ready: Path) -> tuple[int, int]:
    """Wait until the engine of a check is opened, and return the numbers of its process and its session."""
    deadline = time.monotonic() + 300
    while not (ready.exists() and ready.read_text().count(" ") == 2) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid, session = map(int, ready.read_text().split()[:2])
    return pid, session


@pytest.fixture
def sleeping(tmp_path, place, variables):
    """A check whose engine sleeps in the process that was forked."""
    ran("--model", "/nowhere", env=variables)
    (path,) = processes(place)
    ready = tmp_path / "ready"
    command = [*HARNESS, "check", "--engine", "sleeps", "--engine-timeout", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**variables, "SHLVL": "2"},
        cwd=tmp_path,
    )  # fmt: skip
    yield process, *session_of(process, ready), path
    process.kill()
    process.communicate()


def test_a_later_check_gives_what_the_first_gave(place, variables, tmp_path):
    first = ran("--model", "/nowhere", "--format", "json", env=variables, cwd=tmp_path)
    assert len(processes(place)) == 1
    second = ran("--model", "/nowhere", "--format", "json", env=variables, cwd=tmp_path)
    assert (first.returncode, first.stdout, first.stderr) == (second.returncode, second.stdout, second.stderr)
    assert first.returncode == 2
    assert '"code": "H0' in first.stdout


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_forked_process(sleeping, tmp_path, number, status):
    process, pid, session, _ = sleeping
    assert session not in (os.getsid(0), pid)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert err.endswith("interrupted\n")
    assert f"opened 2 {tmp_path}" in out + err
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_forked_process_ends_with_its_command(sleeping):
    process, pid, _, _ = sleeping
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_the_death_of_a_forked_process_is_no_verdict(sleeping):
    process, pid, _, _ = sleeping
    os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == exit_status(Code.NO_VERDICT)
    assert "H146" in err


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"])
def test_another_environment_finds_no_process(place, variables, monkeypatch, name):
    ran("--model", "/nowhere", env=variables)
    (path,) = processes(place)
    code = "import sys; sys.path.pop(0); from harness.cli import resident; print(resident._socket_path())"
    paths = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        for environment in (variables, {**variables, name: "7"})
    ]
    assert [Path(item.stdout.strip()) == path for item in paths] == [True, False]


def test_a_module_that_changes_ends_the_process(place, variables):
    ran("--model", "/nowhere", env=variables)
    (path,) = processes(place)
    (place / "modules" / "new.py").write_text("")
    connect(path)
    deadline = time.monotonic() + 60
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not path.exists()


def test_nothing_is_left_behind_unless_it_is_asked_for(place, variables):
    before = set((place / "tmp").glob("*/*.lock"))
    for value in ("", "0"):
        ran("--model", "/nowhere", env={**variables, resident.VARIABLE: value, "SHLVL": "3", "OTHER": "1"})
    assert set((place / "tmp").glob("*/*.lock")) == before


LEFT = """
import os, socket, sys
from harness.cli import resident

resident._become = lambda *_: os._exit(print("begun", flush=True) or 0)
command, connection = socket.socketpair()
socket.send_fds(command, [resident._LENGTH.pack(2)], [0, 1, 2, 0, 0])
command.sendall(b"{}")
command.close()
resident._run(connection)
"""


def test_a_command_that_no_longer_waits_is_not_begun():
    """It runs in a child of the command by then: what is begun here would run it a second time."""
    left = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60, check=False)
    assert left.stdout == ""  # the pipe is open until the last process has ended
    assert "BrokenPipeError" in left.stderr


def test_a_command_that_ignores_a_signal_finds_no_process_that_does_not():
    places, handler = set(), signal.getsignal(signal.SIGHUP)
    try:
        for how in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGHUP, how)
            places.add(resident._inherited())
    finally:
        signal.signal(signal.SIGHUP, handler)
    assert len(places) == 2
