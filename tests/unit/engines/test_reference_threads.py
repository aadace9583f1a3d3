"""Threads of an engine that makes tokens."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from harness.engines import reference_threads
from harness.engines.reference_threads import engine_threads
from reference_engine.fast.threads import ThreadCount


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(reference_threads, "choose_num_threads", lambda: ThreadCount(3, "measured", {}))
    yield
    torch.set_num_threads(before)


def test_a_large_model_has_as_many_as_were_measured_and_the_number_is_put_back() -> None:
    with suppress(ZeroDivisionError), engine_threads(512, "cpu") as description:
        assert (torch.get_num_threads(), description) == (3, "3, measured")
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


def test_a_small_model_has_one() -> None:
    with engine_threads(511, "cpu") as description:
        assert (torch.get_num_threads(), description) == (1, "")


def test_nothing_is_measured_for_a_gpu() -> None:
    with engine_threads(4096, "cuda:0") as description:
        assert (torch.get_num_threads(), description) == (2, "")
