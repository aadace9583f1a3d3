"""The version that a gate times against: of git, of a wheel, of a folder; and never the same one."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from harness.errors import Code, HarnessError
from harness.profiling.gate.versions import Version, engine_packages, installed_version, stored_version

PACKAGES = ("mine",)
NOWHERE = Version(label="now", root=Path("/"))


@pytest.fixture
def repository(tmp_path):
    """A repository whose package lies in src/, with two commits."""
    folder = tmp_path / "repository"
    package = folder / "src" / "mine"
    package.mkdir(parents=True)

    def git(*command: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(folder), *identity, *command], check=True, capture_output=True)

    git("init", "--initial-branch", "main")
    for version in ("old", "new"):
        (package / "__init__.py").write_text(f"VERSION = {version!r}\n")
        git("add", ".")
        git("commit", "--message", version)
        git("tag", version)
    return folder


def read(version: Version) -> str:
    return (version.root / "mine" / "__init__.py").read_text()


def test_a_revision_of_the_checkout_that_the_engine_lies_in(repository):
    now = Version(label="now", root=repository / "src")
    with stored_version("old", PACKAGES, now=now) as stored:
        assert read(stored) == "VERSION = 'old'\n"
        root = stored.root
    assert not root.exists()
    assert read(now) == "VERSION = 'new'\n"


def test_a_revision_of_another_repository(repository):
    with stored_version("old", PACKAGES, now=NOWHERE, repository=repository) as stored:
        assert read(stored) == "VERSION = 'old'\n"


def test_a_wheel(repository, tmp_path):
    wheel = tmp_path / "mine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("mine/__init__.py", "VERSION = 'wheel'\n")
    with stored_version(str(wheel), PACKAGES, now=NOWHERE) as stored:
        assert read(stored) == "VERSION = 'wheel'\n"


def test_a_folder_whose_package_lies_in_src(repository):
    with stored_version(str(repository), PACKAGES, now=NOWHERE) as stored:
        assert stored.root == repository / "src"


@pytest.mark.parametrize(
    ("against", "packages", "message"),
    [
        ("no-such-revision", PACKAGES, "cannot be read from git"),
        ("old", ("other",), "the engine's package 'other' is not in it"),
    ],
)
def test_what_is_not_there_is_refused(repository, against, packages, message):
    now = Version(label="now", root=repository / "src")
    with pytest.raises(HarnessError, match=message) as caught, stored_version(against, packages, now=now):
        pass
    assert caught.value.code is Code.BAD_OPTION


def test_an_engine_from_a_wheel_needs_a_repository(tmp_path):
    now = Version(label="now", root=tmp_path)
    with pytest.raises(HarnessError, match="not installed from a checkout"), stored_version("main", PACKAGES, now=now):
        pass


def test_our_engines_are_their_adapter_and_themselves():
    assert engine_packages("reference") == ("harness", "reference_engine")
    root = installed_version(("harness",)).root
    assert (root / "harness" / "profiling").is_dir()
