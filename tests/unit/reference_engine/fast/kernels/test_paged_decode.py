from __future__ import annotations

from typing import Any

import pytest
import torch

from .launching import IGNORE_NUMPY
from .workload import TOLERANCE, Workload, relative_l2

pytestmark = IGNORE_NUMPY
LENS = (1, 15, 16, 17, 33, 64)
ONES = (1,) * len(LENS)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_split_or_not(device: torch.device, dtype: torch.dtype, num_splits: int) -> None:
    workload = Workload(device, context_lens=LENS, dtype=dtype)
    q = workload.queries(ONES)
    actual = workload.decode(q, min_split_keys=64 // num_splits)
    assert relative_l2(actual, workload.expected(q, ONES)) < TOLERANCE[dtype]


@pytest.mark.sampled(5)
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
def test_each_row_sees_its_whole_past(device: torch.device, shape: dict[str, Any]) -> None:
    workload = Workload(device, context_lens=LENS, **shape)
    q = workload.queries(ONES)
    actual = workload.decode(q, min_split_keys=16)
    assert relative_l2(actual, workload.expected(q, ONES)) < TOLERANCE[workload.dtype]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("min_split_keys", [16, 256])
@pytest.mark.parametrize("window", [1, 5, 16, 17, 40])
def test_a_window_ends_where_it_should(device: torch.device, window: int, min_split_keys: int) -> None:
    workload = Workload(device, context_lens=LENS)
    q = workload.queries(ONES)
    actual = workload.decode(q, window, min_split_keys)
    assert relative_l2(actual, workload.expected(q, ONES, window)) < TOLERANCE[torch.float32]
    for request, context_len in enumerate(LENS):  # what is outside the window is not read
        for cache in workload.caches:
            cache.flatten(0, 1)[workload.slots(request)[: max(0, context_len - window)]] = torch.nan
    assert torch.equal(workload.decode(q, window, min_split_keys), actual)


@pytest.mark.parametrize(
    ("num_kv_heads", "num_splits"), [(1, 64), (2, 64), (3, 32), (4, 32), (8, 16), (10, 16), (256, 16)]
)
def test_fewer_heads_are_cut_into_more_splits(device: torch.device, num_kv_heads: int, num_splits: int) -> None:
    from reference_engine.fast.kernels.paged_decode import max_splits

    assert max_splits(num_kv_heads) == num_splits


@pytest.mark.parametrize("context_len", [257, 1024, 1025])
def test_long_contexts_make_longer_splits_not_more(device: torch.device, context_len: int) -> None:
    workload = Workload(device, context_lens=(context_len, 20), num_kv_heads=1)
    q = workload.queries((1, 1))
    actual = workload.decode(q, min_split_keys=16)
    assert relative_l2(actual, workload.expected(q, (1, 1))) < TOLERANCE[torch.float32]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("min_split_keys", [16, 32, 256])
def test_a_row_is_the_same_in_every_batch_bit_for_bit(
    device: torch.device, min_split_keys: int, window: int | None
) -> None:
    workload = Workload(device, context_lens=LENS)
    q = workload.queries(ONES)
    batched = workload.decode(q, window, min_split_keys)
    for request in range(len(LENS)):
        own_q = q[request : request + 1]
        alone = workload.alone(
            request, lambda request_alone, own_q=own_q: request_alone.decode(own_q, window, min_split_keys)
        )
        assert torch.equal(alone, batched[request : request + 1])


@pytest.mark.parametrize("min_split_keys", [16, 256])
def test_a_request_without_keys_gets_zeros(device: torch.device, min_split_keys: int) -> None:
    workload = Workload(device, context_lens=(0, 33))
    actual = workload.decode(workload.queries((1, 1)), min_split_keys=min_split_keys)
    assert not actual[0].any()
    assert actual[1].isfinite().all()


@pytest.mark.parametrize("tensor", ["k", "v"])
@pytest.mark.parametrize("min_split_keys", [16, 256])
def test_a_nan_in_one_s_own_past_shows(device: torch.device, min_split_keys: int, tensor: str) -> None:
    workload = Workload(device, context_lens=(40, 40))
    getattr(workload, tensor)[0][20] = torch.nan
    workload.write(0)
    actual = workload.decode(workload.queries((1, 1)), min_split_keys=min_split_keys)
    assert actual[0].isnan().all()
    assert not actual[1].isnan().any()


def test_requests_may_share_blocks(device: torch.device) -> None:
    workload = Workload(device, context_lens=(33, 40))
    workload.tables[1, :2] = workload.tables[0, :2]
    for rows in (workload.k, workload.v):
        rows[1][:32] = rows[0][:32]
    workload.write(1)
    q = workload.queries((1, 1))
    actual = workload.decode(q, min_split_keys=16)
    assert relative_l2(actual, workload.expected(q, (1, 1))) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("min_split_keys", [16, 256])
def test_large_scores_do_not_overflow(device: torch.device, min_split_keys: int) -> None:
    workload = Workload(device, context_lens=LENS)
    q = workload.queries(ONES) * 1000
    actual = workload.decode(q, min_split_keys=min_split_keys)
    assert relative_l2(actual, workload.expected(q, ONES)) < 1e-4


def test_prefill_and_decode_agree(device: torch.device) -> None:
    workload = Workload(device, context_lens=LENS)
    q = workload.queries(ONES)
    assert relative_l2(workload.decode(q, min_split_keys=16), workload.prefill(q, ONES).double()) < 1e-6


@pytest.mark.parametrize("window", [None, 32, 40])
def test_splits_that_are_exactly_full(device: torch.device, window: int | None) -> None:
    lens = (16, 32, 48, 64)
    workload = Workload(device, context_lens=lens)
    q = workload.queries((1,) * len(lens))
    actual = workload.decode(q, window, min_split_keys=16)
    assert relative_l2(actual, workload.expected(q, (1,) * len(lens), window)) < TOLERANCE[torch.float32]


def test_a_request_with_one_split_is_not_merged(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from reference_engine.fast.kernels import paged_decode

    workload = Workload(device, context_lens=(16, 5, 0))
    q = workload.queries((1, 1, 1))
    expected = workload.decode(q, min_split_keys=16)
    workload.tables = torch.nn.functional.pad(workload.tables, (0, 9))  # wide tables: many programs, one split each
    monkeypatch.setattr(paged_decode.torch, "empty", lambda *args, **kwargs: torch.full(*args, torch.nan, **kwargs))
    assert torch.equal(workload.decode(q, min_split_keys=16), expected)


def test_weights_are_rounded_before_they_meet_v(device: torch.device) -> None:
    """The convention of FlashAttention: weights 1 and exp(-2^-10) are one number in bfloat16, and V cancels them."""
    workload = Workload(device, context_lens=(16,), num_kv_heads=1, group=1, dtype=torch.bfloat16)
    for rows in (*workload.k, *workload.v):
        rows.zero_()
    workload.k[0][::2, 0, 0] = 2**-8
    workload.v[0][::2], workload.v[0][1::2] = 1, -1
    workload.write(0)
    q = torch.zeros(1, 1, workload.head_dim, dtype=torch.bfloat16, device=device)
    q[0, 0, 0] = 1
    assert float(workload.expected(q, (1,))[0, 0, 0]) > 4e-4
    assert not workload.decode(q).any()
