"""How often a check opens the files of its checkpoint and of its golden: the harness itself opens each once."""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from harness.formats.case import RequestSpec
from harness.judge.jobs.check import run_check
from harness.judge.jobs.opened import run_golden
from harness.plan import plan_request
from harness.results.check import Outcome

_WATCHERS = []


def _watch(event, arguments):
    for watcher in _WATCHERS if event == "open" else ():
        watcher(arguments[0])


@pytest.fixture
def opened():
    """Count opens by package and path. What compiled code opens (tokenizers, safetensors) is not seen."""
    counts, root = Counter(), Path(__file__).parents[2]

    def count(path):
        if not isinstance(path, str | bytes | os.PathLike):
            return
        frame = sys._getframe(2)
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if "transformers" in file.parts or file.is_relative_to(root):
                package = "transformers" if "transformers" in file.parts else file.relative_to(root).parts[0]
                counts[package, Path(os.fsdecode(path))] += 1
                return
            frame = frame.f_back

    if not _WATCHERS:
        sys.addaudithook(_watch)  # cannot be taken away again
    _WATCHERS[:] = [count]
    yield counts
    _WATCHERS[:] = [lambda _path: None]


def of_folder(counts, folder, package="harness"):
    return {path.name: number for (by, path), number in counts.items() if by == package and path.parent == folder}


def test_the_harness_opens_each_file_once(opened, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    folder = checkpoints / "qwen3-tiny"
    asked = {"model": str(folder), "requests": [RequestSpec(prompt="hu rin", max_new_tokens=2)], "schedules": ["plain"]}
    run_golden(plan_request(**asked))  # into the cache
    opened.clear()
    assert run_check(plan_request(**asked)).runs[0].outcome is Outcome.PASS
    # config.json was read for the golden and is unchanged since
    assert of_folder(opened, folder) == {"model.safetensors": 1}
    (golden,) = (tmp_path / "goldens").iterdir()
    once = {name: number for name, number in of_folder(opened, golden).items() if not name.startswith("step-")}
    assert once == {"manifest.json": 1, "golden.json": 1, "noise.safetensors": 1}
