"""Layouts of paged caches are learned from their writers, whatever they are, and the cache is put back."""

import pytest
import torch

from harness.engines.paged_cache import CacheLayout
from harness.errors import Code, HarnessError

SLOTS, HEADS, SIZE, BLOCK = 12, 2, 8, 4


def plain(cache, rows, slots):
    cache.view(SLOTS, HEADS, SIZE)[slots] = rows.to(cache.dtype)


def by_head(cache, rows, slots):
    cache.view(SLOTS // BLOCK, HEADS, BLOCK, SIZE)[slots // BLOCK, :, slots % BLOCK] = rows.to(cache.dtype)


def vectorised(cache, rows, slots):
    """[blocks, heads, size / 4, block, 4], as vLLM has kept its keys."""
    view = cache.view(SLOTS // BLOCK, HEADS, SIZE // 4, BLOCK, 4)
    view[slots // BLOCK, :, :, slots % BLOCK] = rows.to(cache.dtype).unflatten(-1, (SIZE // 4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("write", [plain, by_head, vectorised])
def test_what_was_written_is_read(write, dtype):
    before = torch.randn(SLOTS * HEADS * SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    cache = before.clone()
    layout = CacheLayout.learn(
        cache, lambda rows, slots: write(cache, rows, slots), num_slots=SLOTS, row_shape=(HEADS, SIZE)
    )
    assert torch.equal(cache.float(), before.float()), "the cache is put back"
    rows = torch.randn(3, HEADS, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    slots = torch.tensor([7, 0, 10])
    write(cache, rows, slots)
    assert torch.equal(layout.read(cache, slots.tolist()).float(), rows.float())


def test_a_cache_with_room_between_its_rows():
    cache = torch.zeros(SLOTS, HEADS, SIZE + 3)
    store = lambda rows, slots: cache.__setitem__((slots, slice(None), slice(0, SIZE)), rows)  # noqa: E731
    layout = CacheLayout.learn(cache, store, num_slots=SLOTS - 2, row_shape=(HEADS, SIZE))
    store(torch.ones(1, HEADS, SIZE), torch.tensor([3]))
    assert layout.read(cache, [3]).sum() == HEADS * SIZE
    assert layout.read(cache, [4]).sum() == 0


@pytest.mark.parametrize("damage", ["lost", "shared", "twice"])
def test_a_writer_that_loses_or_doubles_an_element(damage):
    cache = torch.zeros(2, SLOTS, HEADS, SIZE)
    before = cache.clone()

    def write(rows, slots):
        cache[0, slots] = rows
        if damage == "lost":
            cache[0, 5, 1, 2] = 0
        elif damage == "shared":
            cache[0, 5] = cache[0, 4]
        else:
            cache[1, slots] = rows

    with pytest.raises(HarnessError) as caught:
        CacheLayout.learn(cache, write, num_slots=SLOTS, row_shape=(HEADS, SIZE))
    assert caught.value.code is Code.BAD_CACHE_LAYOUT
    assert torch.equal(cache, before)


def test_a_writer_that_raises_leaves_the_cache_as_it_was():
    cache = torch.ones(SLOTS, HEADS, SIZE)

    def write(rows, slots):
        cache[0] = 5
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        CacheLayout.learn(cache, write, num_slots=SLOTS, row_shape=(HEADS, SIZE))
    assert bool((cache == 1).all())
