"""SGLang 0.5.23: a look-up that matches half of a node makes the other half recently used too. SGLang alone, no harness.

Two prompts of two pages are cached, the older one first. A look-up then hits the older one's first page. Its second page has not
been used since it was cached, so that it is the least recently used one; but the other prompt is evicted, which is younger.
"""

import sys
from array import array
from unittest.mock import MagicMock

from transformers.utils import is_torchvision_available

if not is_torchvision_available():  # SGLang imports it for images
    for name in ("", ".io", ".ops", ".transforms", ".transforms.functional", ".transforms.v2"):
        sys.modules[f"torchvision{name}"] = MagicMock()

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

OLDER, YOUNGER, LOOKED_UP = [1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 9, 9]


def key(tokens):
    return RadixKey(array("q", tokens))


for look_up in (None, LOOKED_UP):
    freed = []
    allocator = MagicMock(device="cpu")
    allocator.free_segment = lambda slots, start_pos, freed=freed: freed.extend(slots.tolist())
    tree = RadixCache.create_simulated(mock_allocator=allocator, page_size=2)
    for tokens in (OLDER, YOUNGER):
        tree.insert(InsertParams(key=key(tokens)))  # a slot has the number of its token
    if look_up is not None:
        hit = tree.match_prefix(MatchPrefixParams(key=key(look_up))).device_prefix_len
        print(f"a look-up of {look_up} hits {hit} tokens;", end=" ")
    tree.evict(EvictParams(num_tokens=2))
    print(f"evicted to free 2 slots: tokens {freed}")
