"""The process of an engine, and those that it starts itself: one that ends is named in the error that follows."""

import multiprocessing
import os
import signal
import time
from queue import Queue

import pytest

from harness.engines.process import EngineProcess, watched_processes
from harness.errors import Code, HarnessError

SAYS_ITS_PATH = """
import sys
from harness.engines.worker import serve

def main():
    serve(lambda message: {"path": sys.path})
"""


class Says(EngineProcess):
    module = "says_its_path"


def test_packages_of_its_own_come_before_ours(tmp_path, monkeypatch):
    for folder in ("theirs", "ours"):
        (tmp_path / folder).mkdir()
    (tmp_path / "theirs" / "says_its_path.py").write_text(SAYS_ITS_PATH)
    monkeypatch.syspath_prepend(tmp_path / "ours")
    paths = [str(tmp_path / "theirs"), str(tmp_path / "more")]
    process = Says("worker", variables={"PYTHONPATH": os.pathsep.join(paths)})
    try:
        path_of_process = process.ask({}, doing="starting", timeout_s=600)["path"]
    finally:
        process.close()
    assert path_of_process[:3] == [*paths, str(tmp_path / "ours")]


@pytest.fixture
def process():
    started = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(3600,))
    started.start()
    yield started
    started.kill()
    started.join()


def test_the_one_that_ended_is_named_before_what_followed(process):
    answers = Queue()

    def engine_waits_for_an_answer():
        os.kill(process.pid, signal.SIGKILL)
        answers.get(timeout=600)
        raise RuntimeError("cancelled")

    watched = watched_processes("mine", {"rank 1": process}, wake=lambda: answers.put(None))
    with pytest.raises(HarnessError) as caught, watched:
        engine_waits_for_an_answer()
    assert (caught.value.code, caught.value.where) == (Code.ENGINE_FAILED, "mine")
    assert caught.value.what == "rank 1 ended by signal SIGKILL before it was done (RuntimeError: cancelled)"


def test_an_error_of_the_block_is_its_own_while_all_live(process):
    with pytest.raises(RuntimeError, match="cancelled"), watched_processes("mine", {"rank 1": process}):
        raise RuntimeError("cancelled")


def test_an_engine_without_processes_is_left_alone():
    with pytest.raises(RuntimeError, match="cancelled"), watched_processes("mine", {}):
        raise RuntimeError("cancelled")
