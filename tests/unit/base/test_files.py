"""Scratch folders: gone with their block, and swept up after a process that was killed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.base import files
from harness.base.files import MARK, scratch_folder, sweep


def aged(folder):
    """Make a folder look old enough to be looked at."""
    past = time.time() - 2 * files._SWEPT_AFTER_S
    os.utime(folder / MARK, (past, past))
    return folder


def test_a_folder_is_gone_with_its_block(tmp_path):
    def fail(folder):
        (folder / "file").write_text("x")
        raise RuntimeError

    with pytest.raises(RuntimeError), scratch_folder(".making-", tmp_path) as folder:
        fail(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_gone_though_its_removal_was_interrupted(tmp_path, monkeypatch):
    unlink = os.unlink

    def interrupted(*args, **named):
        monkeypatch.setattr(os, "unlink", unlink)
        raise KeyboardInterrupt

    def leave():
        with scratch_folder(".making-", tmp_path) as folder:
            (folder / "file").write_text("x")
            monkeypatch.setattr(os, "unlink", interrupted)

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_killed_process_is_swept_and_that_of_a_living_one_is_not(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from harness.base.files import scratch_folder\n"
        "with scratch_folder('.making-', Path(sys.argv[1])) as folder: print(folder, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    (folder,) = tmp_path.iterdir()
    sweep(tmp_path, ".making-")
    assert folder.exists(), "its process lives"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    sweep(tmp_path, ".other-")
    assert folder.exists(), "it is of another kind"
    with scratch_folder(".making-", tmp_path) as later:
        assert list(tmp_path.iterdir()) == [later]


def test_a_folder_that_is_young_may_not_have_been_locked_yet(tmp_path):
    folder = tmp_path / ".making-1"
    folder.mkdir()
    (folder / MARK).touch()
    sweep(tmp_path, ".making-")
    assert folder.exists()
    aged(folder)
    sweep(tmp_path, ".making-")
    assert not folder.exists()


def test_what_somebody_else_made_stays(tmp_path):
    (tmp_path / ".making-plans").mkdir()
    (tmp_path / ".making-plans" / "world-peace.txt").write_text("ten years")
    (tmp_path / ".making-linked").mkdir()
    (tmp_path / ".making-linked" / MARK).symlink_to(tmp_path / ".making-plans" / "world-peace.txt")
    sweep(tmp_path, ".making-")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".making-linked", ".making-plans"]


def test_a_missing_place_stays_missing(tmp_path):
    sweep(tmp_path / "nowhere", ".making-")
    assert not (tmp_path / "nowhere").exists()


def test_every_temporary_folder_of_the_harness_is_one_that_is_swept():
    sources = Path(files.__file__).parents[1].rglob("*.py")
    makers = {path.name for path in sources if re.search(r"TemporaryDirectory\(|\bmkdtemp\(dir", path.read_text())}
    assert makers == {"files.py"}
