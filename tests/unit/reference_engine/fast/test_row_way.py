"""The way to multiply a single row: the fastest one, measured once a machine, dtype and number of threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reference_engine.fast import row_way
from reference_engine.fast.row_way import WAYS, RowWay, with_row_way

FASTEST = RowWay(4, asks_ahead=False)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Stands for the measurement; one entry for each time that it was made."""
    calls: list[torch.dtype] = []
    times = {str(way): 1.0 if way == FASTEST else 2.0 for way in WAYS}
    monkeypatch.setattr(row_way, "_measure", lambda _kernel, dtype: calls.append(dtype) or times)
    return calls


def kernel(*args: Any, **way: Any) -> dict[str, Any]:
    return way


def chosen(dtype: torch.dtype = torch.float32) -> Any:
    return with_row_way(kernel, dtype)(torch.ones(1, 2), torch.ones(3, 2), None)


def test_the_fastest_way_is_kept_for_the_next_process(measured: list[torch.dtype]) -> None:
    assert [chosen(), chosen()] == [{"row_outputs": 4, "asks_ahead": False}] * 2
    assert measured == [torch.float32]


def test_each_dtype_and_number_of_threads_has_its_own(
    measured: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen()
    chosen(torch.bfloat16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    chosen()
    assert measured == [torch.float32, torch.bfloat16, torch.float32]


@pytest.mark.parametrize(("gain", "way"), [(0.04, FASTEST), (0.02, RowWay())])
def test_a_way_that_is_hardly_faster_is_not_taken(gain: float, way: RowWay) -> None:
    times = {str(item): 3.0 for item in WAYS} | {str(RowWay()): 1.0, str(FASTEST): 1.0 - gain}
    assert row_way._fastest(times) == way


@pytest.mark.parametrize("content", ["", "{}", '{"2 at once, asking ahead": 1.0}', "[1]"])
def test_what_does_not_have_every_way_is_measured_again(
    measured: list[torch.dtype], tmp_path: Path, content: str
) -> None:
    chosen()
    (kept,) = (tmp_path / "reference_engine").iterdir()
    kept.write_text(content)
    assert chosen() == {"row_outputs": 4, "asks_ahead": False}
    assert len(measured) == 2


def test_a_measurement_times_each_way_over_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_way, "NUM_BYTES", 1 << 20)
    calls: list[tuple[RowWay, torch.Tensor]] = []
    times = row_way._measure(lambda _x, weight, _bias, **way: calls.append((RowWay(**way), weight)), torch.bfloat16)
    assert list(times) == [str(way) for way in WAYS]
    assert all(0 < time_ms < 1e3 for time_ms in times.values())
    weights = {id(weight): weight for _, weight in calls}.values()
    assert sum(weight.nbytes for weight in weights) == 1 << 20
    for way in WAYS:
        assert sum(item == way for item, _ in calls) == row_way.NUM_ROUNDS * row_way.NUM_WEIGHTS
