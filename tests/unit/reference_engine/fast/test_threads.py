"""The number of threads: the user's, else the measured one, else torch's; kept once a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from reference_engine.fast import threads
from reference_engine.fast.threads import choose_num_threads

TIMES = {1: 4.0, 2: 2.0, 4: 1.0, 8: 1.05, 16: 3.0}


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 9.0, 9.0), raising=False)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Stands for the measurement; one entry for each time that it was made."""
    calls: list[object] = []
    monkeypatch.setattr(threads, "_measure", lambda candidates: calls.append(candidates) or TIMES)
    return calls


def test_of_those_that_are_about_as_fast_the_largest_is_taken_and_kept(measured: list[object]) -> None:
    first, second = choose_num_threads(), choose_num_threads()
    assert (first.num_threads, first.source, first.milliseconds) == (8, "measured", TIMES)
    assert second == first
    assert len(measured) == 1
    assert str(first) == "8, measured (1: 4.00 ms, 2: 2.00 ms, 4: 1.00 ms, 8: 1.05 ms, 16: 3.00 ms)"


def test_the_users_number_is_neither_measured_nor_changed(
    measured: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert str(choose_num_threads()) == f"{torch.get_num_threads()}, OMP_NUM_THREADS"
    assert measured == []


def test_a_busy_machine_is_not_measured(measured: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3, 0.0, 0.0), raising=False)
    chosen = choose_num_threads()
    assert (chosen.num_threads, measured) == (torch.get_num_threads(), [])
    assert "too busy" in chosen.source


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', '{"1": null}', "{}"])
def test_what_cannot_be_read_is_measured_again(measured: list[object], tmp_path: Path, content: str) -> None:
    choose_num_threads()
    (kept,) = (tmp_path / "reference_engine").iterdir()
    kept.write_text(content)
    assert choose_num_threads().num_threads == 8
    assert len(measured) == 2


def test_another_part_of_the_machine_is_another_machine(
    measured: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for candidates in ([1, 2, 4], [1, 2]):
        monkeypatch.setattr(threads, "_candidates", lambda candidates=candidates: candidates)
        choose_num_threads()
    assert measured == [[1, 2, 4], [1, 2]]


def test_a_folder_that_cannot_be_written_costs_a_measurement_each_time(
    measured: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [choose_num_threads().num_threads for _ in range(2)] == [8, 8]
    assert len(measured) == 2


def test_a_measurement_times_each_number_and_puts_torchs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "WEIGHT_SHAPE", (64, 64))
    before, used = torch.get_num_threads(), []
    monkeypatch.setattr(threads, "linear", lambda x, weight: used.append(torch.get_num_threads()))
    times = threads._measure([1, 2])
    assert set(used) == {1, 2}
    assert list(times) == [1, 2]
    assert all(0 < time_ms < 1e3 for time_ms in times.values())
    assert torch.get_num_threads() == before


def test_candidates_are_the_processors_and_halves_of_them_and_torchs_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert threads._candidates() == [1, 3, 5, 6, 12]
