"""The cache is kept within its bound: the least recently used goes first, and nothing that a living process uses."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint, bound, cache_dir
from harness.formats.checkpoint.bound import hold, trim
from harness.formats.checkpoint.converted import made_once
from harness.formats.inspect import inspect_path, render_text
from harness.formats.recording import Recording, RequestInfo

from ...recording_writer import new_writer

KB = 1000
READS = """
import sys, time
from pathlib import Path
from harness.formats.checkpoint.bound import hold
held = hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""
WRITES = """
import sys, time
from pathlib import Path
from harness.formats.checkpoint.converted import made_once
def write(folder):
    (folder / "weights").write_bytes(bytes(1000))
    print("writing", flush=True)
    time.sleep(600)
made_once(Path(sys.argv[1]), "mine", write)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HARNESS_CACHE_GB", str(2.5 * KB / 1e9))
    return cache_dir()


def put(cache: Path, name: str, *, age_s: float = 3600.0, num_bytes: int = KB) -> Path:
    """Put an entry into the cache that was used so long ago."""
    entry = cache / "goldens" / name
    entry.mkdir(parents=True)
    (entry / "values").write_bytes(bytes(num_bytes))
    then = time.time() - age_s
    for path in (entry / "values", entry):
        os.utime(path, (then, then))
    return entry


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "goldens").iterdir())


@pytest.fixture
def running():
    """Start a program that says a word when it has come to its point, and kill it at the end."""
    processes = []

    def start(code: str, *arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", code, *map(str, arguments)]
        processes.append(process := subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert process.stdout is not None
        assert process.stdout.readline().strip() in ("held", "writing")
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_the_least_recently_used_goes_first_and_only_as_much_as_is_too_much(cache):
    for name, age_s in (("old", 9000.0), ("older", 9900.0), ("new", 4000.0), ("newer", 3000.0)):
        put(cache, name, age_s=age_s)
    trim()
    assert names(cache) == ["new", "newer"]


def test_what_was_used_is_new_again(cache):
    first = put(cache, "first", age_s=9000.0)
    put(cache, "second", age_s=8000.0)
    put(cache, "third", age_s=7000.0)
    held = hold(first)
    assert held is not None
    assert names(cache) == ["first", "third"], "to open an entry trims the cache that has something new"
    del held
    put(cache, "fourth")
    trim()
    assert "first" in names(cache), "it was used a moment ago"


def test_a_small_file_in_the_cache_is_an_entry_too(cache):
    put(cache, "golden", num_bytes=2 * KB)
    (cache / "weights").mkdir()
    memo = cache / "weights" / "digest"
    memo.write_bytes(bytes(KB))
    then = time.time() - 9000.0
    os.utime(memo, (then, then))
    trim()
    assert not memo.exists()
    assert names(cache) == ["golden"]


def test_what_another_process_reads_stays_until_the_process_is_killed(cache, running):
    entry = put(cache, "read", num_bytes=9 * KB)
    process = running(READS, entry)
    put(cache, "idle", age_s=8000.0)
    os.utime(entry, (time.time() - 9000.0,) * 2)  # used long ago, and still open
    trim()
    assert names(cache) == ["read"]
    assert inspect_path(cache)["parts"][0]["in_use"] == 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert inspect_path(cache)["parts"][0]["in_use"] == 0
    trim()
    assert names(cache) == []


def test_what_another_process_writes_stays_until_the_process_is_killed(cache, running):
    place = cache / "goldens" / "written"
    process = running(WRITES, place)
    (making,) = (cache / "goldens").glob(".making-*")
    trim()
    assert (making / "checkpoint" / "weights").stat().st_size == KB
    process.send_signal(signal.SIGKILL)
    process.wait()
    made_once(place, "mine", lambda folder: (folder / "weights").write_bytes(b"whole") and {})
    assert names(cache) == ["written"], "what the killed process left is gone, too"


def test_two_processes_that_evict_at_once_remove_each_entry_once(cache, monkeypatch):
    for at in range(6):
        put(cache, str(at), age_s=9000.0 - at)
    evict, took = bound._evict, []

    def evict_after_another(path):
        took.append((evict(path), evict(path)))
        return took[-1][0]

    monkeypatch.setattr(bound, "_evict", evict_after_another)
    trim()
    assert took == [(True, False)] * 4
    assert names(cache) == ["4", "5"]


def test_an_entry_that_was_just_made_stays_until_its_maker_can_hold_it(cache):
    put(cache, "fresh", age_s=1.0, num_bytes=9 * KB)
    trim()
    assert names(cache) == ["fresh"]


def test_a_part_of_the_cache_that_is_a_link_to_elsewhere_is_left_alone(cache, tmp_path):
    elsewhere = put(tmp_path / "elsewhere", "kept", num_bytes=9 * KB)
    (cache / "gguf").symlink_to(elsewhere.parent)
    trim()
    assert elsewhere.exists()
    assert hold(cache / "gguf" / "kept") is None


def test_goldens_and_weights_are_held_for_as_long_as_they_are_open(cache, checkpoints):
    shutil.copytree(checkpoints / "qwen3-tiny", cache / "dequantised" / "weights")
    with new_writer(cache / "goldens" / "golden", [RequestInfo(id=0, token_ids=[1], prompt_length=1)]) as writer:
        writer.begin_step(phase="prefill", request=[0], position=[0])
        writer.tap("tap", torch.zeros(1, 1))
        writer.end_step()
    checkpoint = Checkpoint(cache / "dequantised" / "weights")
    assert checkpoint.config
    golden = Recording.open(cache / "goldens" / "golden")
    assert [part["in_use"] for part in inspect_path(cache)["parts"]] == [1, 1]
    del checkpoint, golden
    gc.collect()
    assert [part["in_use"] for part in inspect_path(cache)["parts"]] == [0, 0]


def test_a_folder_outside_of_the_cache_is_not_held(cache, tmp_path):
    assert hold(tmp_path) is None
    assert hold(cache / "goldens" / "gone") is None


def test_an_entry_that_cannot_be_removed_is_left_and_the_next_one_goes(cache, monkeypatch):
    put(cache, "stubborn", age_s=9000.0)
    put(cache, "old", age_s=8000.0)
    put(cache, "new")
    rename = Path.rename

    def refused(self, target):
        if self.name == "stubborn":
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    trim()
    assert names(cache) == ["new", "stubborn"]


@pytest.mark.parametrize("text", ["abc", "0", "-1", "nan", "1 GB"])
def test_a_bound_that_is_no_size_is_refused_before_anything_is_made(cache, monkeypatch, text):
    monkeypatch.setenv("HARNESS_CACHE_GB", text)
    with pytest.raises(HarnessError, match="the bound of the cache is no size") as caught:
        cache_dir()
    assert (caught.value.code, caught.value.where, caught.value.actual) == (
        Code.BAD_OPTION, "HARNESS_CACHE_GB", repr(text),
    )  # fmt: skip


def test_without_a_bound_half_of_the_file_system_is_kept_free_for_others(cache, monkeypatch):
    put(cache, "golden")
    monkeypatch.delenv("HARNESS_CACHE_GB")
    summary = inspect_path(cache)["summary"]
    statistics = os.statvfs(cache)
    assert summary["limit_bytes"] == statistics.f_blocks * statistics.f_frsize // 2
    assert summary["limit_from"] == "half of the file system"
    monkeypatch.setenv("HARNESS_CACHE_GB", "inf")
    trim()
    assert names(cache) == ["golden"]
    assert inspect_path(cache)["summary"]["limit_bytes"] is None


def test_the_cache_is_shown_folder_by_folder(cache):
    held = hold(put(cache, "a"))
    put(cache, "b", age_s=9000.0, num_bytes=200)
    (row,) = inspect_path(cache)["parts"]
    assert held is not None
    assert (row["folder"], row["num_entries"], row["num_bytes"], row["in_use"]) == ("goldens", 2, KB + 200, 1)
    assert row["least_recently_used"] < row["last_used"]
    assert "in use" in render_text(inspect_path(cache))
