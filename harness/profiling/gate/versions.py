"""The two versions of an engine that are timed in turn: where its sources are now, and those it is held against.

A version is a folder that is put ahead on a worker's path. It is made of a revision of git, of a wheel, or is a folder
that is there already.
"""

import importlib.util
import io
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness.base.scratch import scratch_folder
from harness.engines.adapter import engine_module
from harness.errors import Code, HarnessError

_OWN_PACKAGES = ("harness", "reference_engine")
"""An engine of ours is its adapter in the one and itself in the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Sources of an engine."""

    label: str
    """As the user named it; `now` for what is installed."""
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
    """Lay out the version that is named; what is made for it is gone afterwards.

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
    found = [PurePosixPath(str(file).removesuffix(tail)) for tail in tails for file in files if _ends_with(file, tail)]
    if not found:
        raise _not_in(packages[0], revision, "a revision that has the engine's package")
    root = min(found, key=lambda path: len(path.parts))
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
    """Return what a command said last: its error, as a rule."""
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
