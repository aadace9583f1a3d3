from __future__ import annotations

from typing import Any

import pytest
import torch

from .launching import IGNORE_NUMPY
from .workload import TOLERANCE, Workload, relative_l2

pytestmark = IGNORE_NUMPY
WHOLE = (1, 15, 16, 17, 33)
CHUNKS = (1, 5, 16, 1, 20)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        *({"group": group} for group in (1, 3, 4)),
        *({"head_dim": head_dim} for head_dim in (12, 32, 64, 80)),
        *({"block_size": block_size} for block_size in (1, 6, 32)),
        *({"dtype": dtype} for dtype in (torch.bfloat16, torch.float16)),
        {"group": 3, "head_dim": 64, "block_size": 32, "dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_chunks_of_any_length_see_their_past(device: torch.device, shape: dict[str, Any]) -> None:
    workload = Workload(device, **shape)
    q = workload.queries(CHUNKS)
    assert relative_l2(workload.prefill(q, CHUNKS), workload.expected(q, CHUNKS)) < TOLERANCE[workload.dtype]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("query_lens", [WHOLE, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("window", [1, 5, 16, 17, 40])
def test_a_window_ends_where_it_should(device: torch.device, query_lens: tuple[int, ...], window: int) -> None:
    workload = Workload(device)
    q = workload.queries(query_lens)
    actual = workload.prefill(q, query_lens, window)
    assert relative_l2(actual, workload.expected(q, query_lens, window)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("rows", "keys"), [(16, 32), (32, 16), (128, 64)])
def test_tiles_of_any_size(device: torch.device, rows: int, keys: int) -> None:
    workload = Workload(device)
    q = workload.queries(WHOLE)
    actual = workload.prefill(q, WHOLE, rows=rows, keys=keys)
    assert relative_l2(actual, workload.expected(q, WHOLE)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [None, 7])
def test_a_row_is_the_same_in_every_batch_bit_for_bit(device: torch.device, window: int | None) -> None:
    workload = Workload(device)
    q = workload.queries(CHUNKS)
    batched = workload.prefill(q, CHUNKS, window).split(CHUNKS)
    for request, rows in enumerate(q.split(CHUNKS)):
        alone = workload.alone(
            request, lambda request_alone, rows=rows: request_alone.prefill(rows, (len(rows),), window)
        )
        assert torch.equal(alone, batched[request])


def test_what_no_row_may_see_is_not_read(device: torch.device) -> None:
    workload = Workload(device, context_lens=(40,))
    q = workload.queries((6,))
    before = workload.prefill(q, (6,), 10)
    for cache in workload.caches:  # positions 0 to 24 are outside the window of the first row, which is 34
        cache.flatten(0, 1)[workload.slots(0)[:25]] = torch.nan
    assert torch.equal(workload.prefill(q, (6,), 10), before)


def test_a_nan_in_one_s_own_past_shows(device: torch.device) -> None:
    workload = Workload(device, context_lens=(20, 20))
    workload.k[0][17] = torch.nan
    workload.write(0)
    q = workload.queries((20, 20))
    actual = workload.prefill(q, (20, 20))
    assert actual[17:20].isnan().all(), "whoever sees it"
    assert not actual[:17].isnan().any(), "and nobody else"
    assert not actual[20:].isnan().any()


def test_requests_may_share_blocks(device: torch.device) -> None:
    workload = Workload(device, context_lens=(33, 40))
    workload.tables[1, :2] = workload.tables[0, :2]
    for rows in (workload.k, workload.v):
        rows[1][:32] = rows[0][:32]
    workload.write(1)
    q = workload.queries((3, 30))
    assert relative_l2(workload.prefill(q, (3, 30)), workload.expected(q, (3, 30))) < TOLERANCE[torch.float32]


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    workload = Workload(device)
    q = workload.queries(WHOLE) * 1000
    assert relative_l2(workload.prefill(q, WHOLE), workload.expected(q, WHOLE)) < 1e-4


@pytest.mark.usefixtures("device")
def test_tiles_never_span_requests() -> None:
    from reference_engine.fast.kernels.paged_prefill import cut_into_tiles

    tiles = cut_into_tiles([1, 1, 40, 16], [9, 4, 50, 16], 16, first_request=2)
    assert tiles == [(2, 2, 16, 10), (2, 18, 16, 26), (2, 34, 8, 42), (3, 42, 16, 0)]
    assert cut_into_tiles([1], [9], 16, first_request=1) == []
