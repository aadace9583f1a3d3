"""A process of an engine that ends is named in the error that follows from it."""

import multiprocessing
import os
import signal
import time
from queue import Queue

import pytest

from harness.engines.process import watched_processes
from harness.errors import Code, HarnessError


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
