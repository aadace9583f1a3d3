"""The two versions that a gate times: of git, of a wheel, of a folder; and their processes, forked from one."""

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from harness.errors import Code, HarnessError
from harness.profiling.gate.versions import (
    ForkServer,
    Version,
    Worker,
    engine_packages,
    installed_version,
    stored_version,
)

from ...loopback import until

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


PROGRAM = """
import json, os, sys
import mine
print(json.dumps({"sources": {"mine": [mine.__file__, json.loads(sys.argv[1])["name"]]}, "threads": os.getpid()}))
sys.stdout.flush()
for line in sys.stdin:
    print(json.dumps({"seconds": mine.SECONDS, "hash": hash("text"), "path": os.environ["PYTHONPATH"]}), flush=True)
"""


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Version]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr("harness.profiling.gate.versions._PROGRAM", program)
    texts = {"old": "SECONDS = 1", "new": "SECONDS = 2", "broken": "raise RuntimeError('no such kernel')"}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(text)
    return {name: Version(label=name, root=tmp_path / name) for name in texts}


def test_each_process_imports_its_own_version_and_both_hash_alike(versions):
    with ForkServer(()) as server:
        with (
            Worker(server, versions["old"], {"name": "a"}) as old,
            Worker(server, versions["new"], {"name": "b"}) as new,
        ):
            for one in (old, new):
                one.wait_until_loaded()
            first, second = old.run(), new.run()
            assert (first["seconds"], second["seconds"]) == (1, 2)
            assert first["hash"] == second["hash"]
            assert first["path"].split(os.pathsep)[0] == str(versions["old"].root)
            assert old.sources == {"mine": [str(versions["old"].root / "mine.py"), "a"]}
        with Worker(server, versions["old"], {"name": "c"}) as again:
            again.wait_until_loaded()
            assert again.num_threads != old.num_threads, "a process of its own"


def test_a_version_that_does_not_run_is_named_with_its_error(versions):
    with (
        ForkServer(()) as server,
        pytest.raises(HarnessError, match="no such kernel") as caught,
        Worker(server, versions["broken"], {"name": "a"}) as broken,
    ):
        broken.wait_until_loaded()
    assert caught.value.code is Code.ENGINE_FAILED
    assert caught.value.where == "broken"


def test_a_process_that_hangs_ends_with_the_server(versions, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM + "\nimport time\ntime.sleep(3600)\n")
    with ForkServer(()) as server:
        old = Worker(server, versions["old"], {"name": "a"})
        old.wait_until_loaded()
        process = Path(f"/proc/{old.num_threads}")  # the program tells its number there
        assert process.exists()
    until(lambda: not process.exists(), what="the process has ended")
    old.__exit__(None)
