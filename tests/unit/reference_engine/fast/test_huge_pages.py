from __future__ import annotations

import mmap
import sys

import pytest
import torch

from reference_engine.fast import huge_pages, packing
from reference_engine.fast.huge_pages import MADV_COLLAPSE, MADV_HUGEPAGE, collapse_pages, prefer_huge_pages

PAGE = mmap.PAGESIZE


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(huge_pages, "_advise", lambda *call: calls.append(call))
    return calls


def test_neighbours_are_one_range(advised: list[tuple[int, int, int]]) -> None:
    whole = torch.empty(8 * PAGE, dtype=torch.uint8)
    parts = [whole[: 2 * PAGE], whole[3 * PAGE : 4 * PAGE], whole[6 * PAGE :]]
    collapse_pages([parts[2], parts[0], parts[1]])
    start = whole.data_ptr()
    assert advised == [
        (start, start + 4 * PAGE, MADV_COLLAPSE),
        (start + 6 * PAGE, start + 8 * PAGE, MADV_COLLAPSE),
    ]


def test_a_packed_weight_s_own_memory_is_meant(advised: list[tuple[int, int, int]]) -> None:
    packed = packing.pack(torch.randn(1024, 512))
    if not packed.is_mkldnn:
        pytest.skip("this torch has no oneDNN")
    collapse_pages([packed])
    ((start, stop, _),) = advised
    assert stop - start >= 1024 * 512 * 4


def test_other_devices_are_left_alone(advised: list[tuple[int, int, int]]) -> None:
    meta = torch.empty(PAGE, device="meta")
    collapse_pages([meta])
    prefer_huge_pages(meta)
    assert advised == []
    prefer_huge_pages(torch.empty(3, dtype=torch.uint8))
    assert advised[0][2] == MADV_HUGEPAGE


@pytest.mark.skipif(sys.platform != "linux", reason="the advice is Linux's")
def test_whole_pages_are_advised_and_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []

    class Library:
        def madvise(self, *arguments: object) -> int:
            calls.append(tuple(getattr(argument, "value") for argument in arguments))  # noqa: B009 (three ctypes)
            return -1

    weight = torch.randn(3000, 1000)
    expected = weight.clone()
    collapse_pages([weight])
    assert torch.equal(weight, expected)
    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda name: Library())
    collapse_pages([weight])
    ((start, length, advice),) = calls
    assert (start % PAGE, length % PAGE, advice) == (0, 0, MADV_COLLAPSE)
    assert start <= weight.data_ptr()
    assert start + length >= weight.data_ptr() + weight.nbytes
