from __future__ import annotations

import pytest
import torch

from reference_engine.cache_spec import CPU_CACHE_BYTES, CacheSpec
from reference_engine.errors import CapacityError
from reference_engine.kv_cache import KVCache, context_slots


def make_spec(**changes: object) -> CacheSpec:
    values: dict[str, object] = {
        "num_layers": 2, "num_kv_heads": 3, "head_dim": 4, "dtype": torch.float32, "device": torch.device("cpu"),
        "block_size": 4, "num_blocks": None, "max_num_seqs": 5, "max_model_len": 10,
        "layer_windows": (None, None),
    }  # fmt: skip
    return CacheSpec(**{**values, **changes})


def test_stored_by_slot_and_read_back_by_block_table() -> None:
    cache = KVCache(make_spec(), num_blocks=6, block_size=4)
    table = torch.tensor([[5, 2, 3]])
    slots = context_slots(table, 4, 10)[0]
    assert slots.tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 12, 13]
    k, v = torch.randn(10, 3, 4), torch.randn(10, 3, 4)
    cache.store(1, k, v, slots)
    assert torch.equal(cache.data[0, 1, 2, 1], k[5])
    assert torch.equal(cache.data[1, 1, 5, 3], v[3])
    assert all(torch.equal(a, b) for a, b in zip(cache.gather(1, slots), (k, v), strict=True))


def test_the_null_block_is_finite() -> None:
    assert not KVCache(make_spec(), num_blocks=6, block_size=4).data[:, :, 0].any()


def test_the_default_size_is_what_the_limits_can_use() -> None:
    assert make_spec().default_num_blocks(4) == 1 + 5 * 3


def test_the_default_size_keeps_to_its_share_of_the_memory() -> None:
    spec = make_spec(max_num_seqs=10**6, max_model_len=10**6)
    block_bytes = 2 * 2 * 4 * 3 * 4 * 4
    assert spec.default_num_blocks(4) == 1 + CPU_CACHE_BYTES // block_bytes


@pytest.mark.parametrize("num_blocks", [10**12, 10**30])
def test_a_cache_that_does_not_fit_says_how_large_it_would_be(num_blocks: int) -> None:
    with pytest.raises(CapacityError, match=f"{num_blocks} blocks of 4 tokens = [0-9]+ bytes"):
        KVCache(make_spec(), num_blocks, 4)
