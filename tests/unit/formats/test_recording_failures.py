"""A writer that is killed or finds the disk full, and the memory that writing and reading take."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from harness.errors import Code, HarnessError
from harness.formats.recording import Recording
from harness.formats.recording.writer import is_unfinished

from ...recording_writer import new_writer, requests_of

ROOT = Path(__file__).parents[3]

OPEN_WRITER = """
import torch
from harness.formats.recording import *

def open_writer(path):
    requests = [RequestInfo(id=0, token_ids=[0] * 10_000, prompt_length=1)]
    run = RunInfo(producer=Producer(name="test", version="1"), model=ModelInfo(id="m"), dtype="float32", device="cpu")
    return RecordingWriter(path, run, requests)

def write_step(writer, position, num_columns):
    writer.begin_step(phase="decode", request=[0], position=[position])
    writer.tap("x", torch.full((1, num_columns), float(position)))
    writer.tap("y", torch.full((1, num_columns), float(position)))
    writer.end_step()
"""


def start(script, *arguments):
    """Start a Python process that may call `open_writer` and `write_step`."""
    return subprocess.Popen(
        [sys.executable, "-c", OPEN_WRITER + textwrap.dedent(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        # The fixed threshold makes malloc give freed tensors back at once, so that what is measured is what is held.
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},
    )


def output_of(process, timeout=600):
    out, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0
    return out.strip()


def test_a_killed_writer_leaves_no_recording(tmp_path):
    script = """
    import itertools, sys
    with open_writer(sys.argv[1]) as writer:
        for position in itertools.count():
            write_step(writer, position % 10_000, 100_000)
            if position == 2:
                print("writing", flush=True)
    """
    with start(script, tmp_path / "r") as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "r" / "step-00000.safetensors").exists()
    with pytest.raises(HarnessError) as caught:
        Recording.open(tmp_path / "r")
    assert caught.value.code is Code.NOT_A_RECORDING
    assert "a recording that was interrupted has no manifest" in str(caught.value)


def test_a_file_that_may_not_grow(tmp_path):
    script = """
    import resource, sys
    from harness.errors import HarnessError
    try:
        with open_writer(sys.argv[1]) as writer:
            write_step(writer, 0, 100_000)
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
            write_step(writer, 1, 100_000)
    except HarnessError as error:
        print(error)
    """
    message = output_of(start(script, tmp_path / "r"))
    assert message.startswith("H031: the file cannot be written: File too large")
    assert "step-00001.safetensors" in message
    assert not (tmp_path / "r").exists()


@contextmanager
def tiny_disk(path, num_bytes):
    """Mount a file system of a given size, or skip."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a tmpfs takes root")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def write_until_full(path):
    with new_writer(path, requests_of({0: [0] * 100})) as writer:
        for position in range(100):
            writer.begin_step(phase="decode", request=[0], position=[position])
            writer.tap("x", torch.zeros(1, 25_000))
            writer.end_step()


def test_a_full_disk(tmp_path):
    with tiny_disk(tmp_path / "disk", 1 << 20) as disk:
        with pytest.raises(HarnessError) as caught:
            write_until_full(disk / "r")
        assert caught.value.code is Code.CANNOT_WRITE
        assert "No space left on device" in str(caught.value)
        assert list(disk.iterdir()) == []


def test_a_disk_that_is_full_at_the_manifest(tmp_path, monkeypatch):
    def refuse(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("harness.formats.recording.writer.os.fsync", lambda fd: refuse(None, None))
    with pytest.raises(HarnessError) as caught:
        write_until_full(tmp_path / "r")
    assert caught.value.code is Code.CANNOT_WRITE
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured through /proc")
def test_memory_does_not_grow_with_the_recording(tmp_path):
    script = """
    import json, re, sys
    from pathlib import Path

    def resident():
        status = Path("/proc/self/status").read_text()
        return {name: int(re.search(rf"{name}:\\s+(\\d+)", status)[1]) * 1024 for name in ("RssAnon", "RssFile")}

    class Peak:
        def __init__(self):
            self.base, self.peak = resident(), {}
        def sample(self):
            for name, value in resident().items():
                self.peak[name] = max(self.peak.get(name, 0), value - self.base[name])

    torch.zeros(10).sum()
    writing = Peak()
    with open_writer(sys.argv[1]) as writer:
        for position in range(10):
            write_step(writer, position, 4_000_000)
            writing.sample()
    writing.sample()
    reading = Peak()
    with Recording.open(sys.argv[1]) as recording:
        for step in recording.steps:
            for name in step.tap_names:
                assert float(step.tap(name).max()) == step.index
                reading.sample()
    end = Peak()
    end.base = reading.base
    end.sample()
    print(json.dumps({"writing": writing.peak, "reading": reading.peak, "end": end.peak}))
    """
    peaks = json.loads(output_of(start(script, tmp_path / "r")))
    megabytes = {phase: {name: value / 1e6 for name, value in peak.items()} for phase, peak in peaks.items()}
    total = sum(file.stat().st_size for file in (tmp_path / "r").iterdir()) / 1e6
    assert total > 310
    assert megabytes["writing"]["RssAnon"] < 40  # one tap of 16 MB, made while the last one may be alive
    assert megabytes["reading"]["RssAnon"] < 20
    assert megabytes["reading"]["RssFile"] < 60  # one step of 32 MB
    assert megabytes["end"]["RssFile"] < 20


def test_a_folder_is_unfinished_with_steps_and_without_a_manifest(tmp_path):
    assert not is_unfinished(tmp_path)
    (tmp_path / "step-00000.safetensors").write_bytes(b"")
    assert is_unfinished(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    assert not is_unfinished(tmp_path)
