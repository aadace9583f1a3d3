"""The number of threads, and workers: results in order, errors raised, no thread left behind."""

import threading
import time
from contextlib import suppress

import pytest
import torch

from harness.base.threads import SMALL_HIDDEN_SIZE, Workers, limit_threads, num_spare_threads


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_small_model_runs_on_one_thread_and_the_number_is_put_back():
    with suppress(ZeroDivisionError), limit_threads(SMALL_HIDDEN_SIZE - 1):
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


def test_a_large_model_keeps_its_threads():
    with limit_threads(SMALL_HIDDEN_SIZE):
        assert torch.get_num_threads() == 2


def test_the_users_own_number_rules(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with limit_threads(1):
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_results_come_in_the_order_of_the_calls(num_threads):
    def slow_first(number):
        time.sleep(0.02 if number == 0 else 0)
        return number

    with Workers(num_threads) as workers:
        for number in range(6):
            workers.submit(lambda number=number: slow_first(number))
        assert list(workers.finished(all_but=2)) == [0, 1, 2, 3]
        assert list(workers.finished()) == [4, 5]
        assert list(workers.finished()) == []


@pytest.mark.parametrize("num_threads", [0, 2])
def test_what_a_call_raises_is_raised(num_threads):
    def work():
        with Workers(num_threads) as workers:
            workers.submit(lambda: 1 // 0)
            list(workers.finished())

    with pytest.raises(ZeroDivisionError):
        work()


def test_leaving_the_block_drops_what_was_not_begun():
    begun, is_begun, go = [], threading.Event(), threading.Event()

    def work(number):
        begun.append(number)
        is_begun.set()
        go.wait(600)

    with Workers(1) as workers:
        for number in range(3):
            workers.submit(lambda number=number: work(number))
        is_begun.wait(600)
        threading.Timer(0.05, go.set).start()
    assert begun == [0]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("harness-worker")]


def test_a_worker_uses_one_thread_of_torchs_and_keeps_no_graph():
    x = torch.ones(2, requires_grad=True)
    with Workers(1) as workers:
        workers.submit(lambda: (torch.get_num_threads(), (x * 2).requires_grad))
        assert list(workers.finished()) == [(1, False)]


def test_a_single_thread_has_no_workers_beside_it(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert num_spare_threads(torch.device("cpu")) == 4
    assert num_spare_threads(torch.device("cuda")) == 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert num_spare_threads(torch.device("cpu")) == 0
