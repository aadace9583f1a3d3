"""The two versions of an engine that are timed in turn, and the processes that run them.

A version is a folder that stands ahead on a worker's path: made from a revision of git or a wheel, or an existing
folder.
"""

import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from harness.base.files import scratch_folder
from harness.engines.adapter import engine_module
from harness.errors import Code, HarnessError
from harness.profiling.gate import fork_server, step_worker

_OWN_PACKAGES = ("harness", "reference_engine")
"""An engine of this repository is its adapter in one package and the engine itself in the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The sources of one version of an engine."""

    label: str
    """The user's name for it; `now` for the installed version."""
    root: Path
    """The folder that holds the packages."""


def engine_packages(engine: str) -> tuple[str, ...]:
    """Return the top-level packages that an engine is made of.

    Raises:
        HarnessError: UNKNOWN_ENGINE.
    """
    package = engine_module(engine).partition(".")[0]
    return _OWN_PACKAGES if package in _OWN_PACKAGES else (package,)


def installed_version(packages: Sequence[str]) -> Version:
    """Return the version that this process imports.

    Raises:
        HarnessError: BAD_OPTION: a package cannot be found.
    """
    spec = importlib.util.find_spec(packages[0])
    if spec is None or spec.origin is None:
        raise HarnessError(
            Code.BAD_OPTION,
            "the package cannot be imported here",
            where="--against-package",
            actual=packages[0],
            hint="the name of the engine's top-level package",
        )
    origin = Path(spec.origin)
    return Version(label="now", root=origin.parents[1] if origin.name == "__init__.py" else origin.parent)


@contextmanager
def stored_version(
    against: str, packages: Sequence[str], *, now: Version, repository: Path | None = None
) -> Iterator[Version]:
    """Yield a version in a folder; what was made for it is removed afterwards.

    `against` is a revision of git, a wheel, or a folder that holds the packages; of a revision the repository is None
    for the checkout that `now` lies in.

    Raises:
        HarnessError: BAD_OPTION: no such revision, no repository, or the packages are not in it.
    """
    path = Path(against)
    if repository is None and path.is_dir():
        yield Version(label=against, root=_folder_root(path, packages[0], against))
        return
    with scratch_folder("harness-") as folder:
        if repository is None and path.suffix == ".whl":
            _unpack_wheel(path, folder)
            yield Version(label=against, root=_folder_root(folder, packages[0], against))
        else:
            root = _check_out(repository or _repository_of(now, against), against, packages, folder)
            yield Version(label=against, root=root)


def _folder_root(folder: Path, package: str, against: str) -> Path:
    """Return the folder, or a `src` in it, that holds the package."""
    for root in (folder, folder / "src"):
        if (root / package / "__init__.py").is_file() or (root / f"{package}.py").is_file():
            return root
    raise _not_in(package, against, "a folder with the package, or with src/ and the package in it")


def _unpack_wheel(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    except (OSError, zipfile.BadZipFile) as error:
        what = f"the wheel cannot be read: {getattr(error, 'strerror', None) or error}"
        raise HarnessError(Code.BAD_OPTION, what, where="--against", actual=str(wheel)) from error


def _repository_of(now: Version, against: str) -> Path:
    try:
        command = ["git", "-C", str(now.root), "rev-parse", "--show-toplevel"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise HarnessError(
            Code.BAD_OPTION,
            "the engine is not installed from a checkout, so that a revision of it cannot be found",
            where="--against",
            expected="an engine that is imported from a git checkout",
            actual=f"{against}, and the engine in {now.root}",
            hint="--against-repo DIR names the checkout; --against also takes a wheel or a folder",
        ) from None
    return Path(ran.stdout.strip())


def _check_out(repository: Path, revision: str, packages: Sequence[str], folder: Path) -> Path:
    """Unpack the packages of a revision; the checkout itself is only read."""
    listed = _git(repository, revision, "ls-tree", "-r", "--name-only", f"{revision}^{{commit}}")
    files = [PurePosixPath(line) for line in listed.decode(errors="replace").splitlines()]
    root, paths = _packages_root(files, packages, revision)
    packed = _git(repository, revision, "archive", "--format=tar", revision, "--", *paths)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 has it
        archive.extractall(folder)
    return folder / root


def _packages_root(
    files: Sequence[PurePosixPath], packages: Sequence[str], revision: str
) -> tuple[PurePosixPath, list[str]]:
    """Return the folder in a repository that holds the packages, the outermost one, and their paths."""
    tails = (f"{packages[0]}/__init__.py", f"{packages[0]}.py")
    roots = [PurePosixPath(str(file).removesuffix(tail)) for tail in tails for file in files if _ends_with(file, tail)]
    if not roots:
        raise _not_in(packages[0], revision, "a revision that has the engine's package")
    root = min(roots, key=lambda path: len(path.parts))
    held = {str(file) for file in files}
    kept = []
    for package in packages:
        path = root / package
        kept += [str(path)] if any(path in file.parents for file in files) else []
        kept += [f"{path}.py"] if f"{path}.py" in held else []
    return root, kept


def _ends_with(file: PurePosixPath, tail: str) -> bool:
    return str(file) == tail or str(file).endswith(f"/{tail}")


def _git(repository: Path, revision: str, *command: str) -> bytes:
    try:
        ran = subprocess.run(["git", "-C", str(repository), *command], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.strerror if isinstance(error, OSError) else last_line(error.stderr.decode(errors="replace"))
        raise HarnessError(
            Code.BAD_OPTION,
            f"the revision cannot be read from git: {reason}",
            where="--against",
            actual=f"{revision} of {repository}",
            hint="a commit, tag or branch of the engine's checkout, a wheel, or a folder",
        ) from error
    return ran.stdout


def last_line(messages: str) -> str:
    """Return the last line of a command's output, which is usually its error."""
    return (messages.strip().splitlines() or ["it says nothing"])[-1]


def _not_in(package: str, against: str, expected: str) -> HarnessError:
    return HarnessError(
        Code.BAD_OPTION,
        f"the engine's package {package!r} is not in it",
        where="--against",
        expected=expected,
        actual=against,
        hint="--against-package names the package, --against-repo the repository",
    )


_SERVER, _PROGRAM = Path(fork_server.__file__), Path(step_worker.__file__)
SHARED = ("numpy", "safetensors", "torch", "torch.nn.attention.bias")
"""Modules that engines import and that both versions share; the last one, torch's compiler, takes longest to import."""
PhaseSeconds = dict[str, dict[str, float]]
"""CPU and wall seconds (`cpu`, `wall`) of each phase."""


class ForkServer:
    """The process that the workers of both versions are forked from."""

    def __init__(self, modules: Sequence[str] = SHARED) -> None:
        self._orders, theirs = socket.socketpair()
        # -P: otherwise the server's folder would come before the packages
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
        """Let the process end, and wait: its last work would be timed in the next one."""
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
        loaded = self._answer()
        self.sources, self.num_threads = loaded["sources"], loaded["threads"]

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
