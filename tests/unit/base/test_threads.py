from contextlib import suppress

import pytest
import torch

from harness.base.threads import SMALL_HIDDEN_SIZE, limit_threads


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
