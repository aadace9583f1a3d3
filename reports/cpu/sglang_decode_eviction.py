"""SGLang 0.5.23: a decode step evicts cached pages that it does not need. SGLang alone, no harness.

Four pages of four slots: one is cached, two requests hold one each, one is free. Both requests generate their third token, for
which their own pages have room. The step takes no page, but the cached one is evicted: room for a page each is asked for.
"""

import sys
from array import array
from unittest.mock import MagicMock

from transformers.utils import is_torchvision_available

if not is_torchvision_available():  # SGLang imports it for images
    for name in ("", ".io", ".ops", ".transforms", ".transforms.functional", ".transforms.v2"):
        sys.modules[f"torchvision{name}"] = MagicMock()

import torch
from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_decode
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

pages = PagedTokenToKVPoolAllocator(16, 4, torch.float32, "cpu", kvcache=None, need_sort=False)
tree = RadixCache(CacheInitParams(False, None, pages, 4))
tree.insert(InsertParams(key=RadixKey(array("q", [1, 2, 3, 4])), value=pages.alloc(4)))
last_loc = pages.alloc(8)[[1, 5]]  # second slot of each request's page
print(f"free slots {pages.available_size()}, cached {tree.evictable_size()}")
lengths = torch.tensor([3, 3])
slots = alloc_paged_token_slots_decode(tree, lengths, lengths, last_loc)
print(f"free slots {pages.available_size()}, cached {tree.evictable_size()}, behind {last_loc.tolist()}: {slots.tolist()}")
