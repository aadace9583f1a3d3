from __future__ import annotations

import pytest
import torch

from reference_engine.attention.sdpa import attend_chunk, attend_single, first_key
from reference_engine.attention.select import BACKENDS, find_backend
from reference_engine.errors import ConfigError

from .test_kv_cache import make_spec

N, K, H = 6, 2, 8


def naive(q_TNH: torch.Tensor, k_CKH: torch.Tensor, v_CKH: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Row by row and head by head, in float64."""
    offset = len(k_CKH) - len(q_TNH)
    out = torch.empty(q_TNH.shape, dtype=torch.float64)
    for row in range(len(q_TNH)):
        for head in range(N):
            stop = offset + row + 1
            first = max(0, stop - window) if window is not None else 0
            k, v = (x[first:stop, head // (N // K)].double() for x in (k_CKH, v_CKH))
            out[row, head] = torch.softmax(k @ q_TNH[row, head].double() * H**-0.5, dim=0) @ v
    return out


@pytest.mark.parametrize(("num_rows", "context_len"), [(1, 1), (1, 9), (9, 9), (4, 9), (8, 9), (2, 300)])
def test_a_chunk_sees_its_past_and_nothing_else(num_rows: int, context_len: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(num_rows, N, H), torch.randn(context_len, K, H), torch.randn(context_len, K, H)
    torch.testing.assert_close(attend_chunk(q, k, v).double(), naive(q, k, v), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [1, 3, 8, 9, 10])
@pytest.mark.parametrize(("num_rows", "context_len"), [(1, 1), (1, 9), (9, 9), (4, 9), (8, 9), (1, 20), (7, 20)])
def test_a_window_ends_where_it_should(num_rows: int, context_len: int, window: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(num_rows, N, H), torch.randn(context_len, K, H), torch.randn(context_len, K, H)
    actual = attend_chunk(q, k, v, window)
    torch.testing.assert_close(actual.double(), naive(q, k, v, window), rtol=1e-5, atol=1e-6)
    first = first_key(context_len, num_rows, window)
    k[:first], v[:first] = torch.nan, torch.nan
    assert torch.equal(attend_chunk(q, k, v, window), actual), "what no row sees is not read"


def test_single_rows_of_uneven_lengths_do_not_see_padding() -> None:
    torch.manual_seed(0)
    lens = torch.tensor([3, 7, 1])
    q, k, v = torch.randn(3, N, H), torch.randn(3, 7, K, H), torch.randn(3, 7, K, H)
    mask = (torch.arange(7) < lens[:, None])[:, None, None]
    actual = attend_single(q, k, v, mask)
    for i, length in enumerate(lens):
        expected = naive(q[i : i + 1], k[i, :length], v[i, :length])
        torch.testing.assert_close(actual[i : i + 1].double(), expected, rtol=1e-5, atol=1e-6)


def test_without_limits_every_backend_serves_and_an_unknown_one_is_told_their_names() -> None:
    assert [find_backend(name, make_spec()) for name in BACKENDS] == list(BACKENDS.values())
    with pytest.raises(ConfigError, match="expected one of paged, contiguous, recompute, found flash"):
        find_backend("flash", make_spec())
