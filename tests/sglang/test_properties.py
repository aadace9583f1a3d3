"""SGLang's own pages, radix trees and scheduler under the property suites; bugs put into them are found."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="needs SGLang: docs/adapters/README.md")

from harness.properties.blocks import search_block_manager
from harness.properties.core.search import PROFILES
from harness.properties.scheduler import search_scheduler

pytestmark = pytest.mark.slow
ADAPTERS = Path(__file__).parents[2] / "docs" / "adapters" / "sglang"
SEARCHES = {"blocks": search_block_manager, "scheduler": search_scheduler}


@pytest.fixture
def findings(monkeypatch):
    """Return a function: the invariants that a search with an adapter of docs/adapters/sglang finds broken."""
    monkeypatch.syspath_prepend(ADAPTERS)
    importlib.import_module("cpu")  # before SGLang

    def find(suite, name, *, is_first_enough=True):
        adapter = getattr(importlib.import_module(suite), name)
        report = SEARCHES[suite](adapter, PROFILES["dev"].settings(), is_first_enough=is_first_enough)
        return {finding.invariant for finding in report.findings}

    return find


@pytest.mark.parametrize(
    ("suite", "name", "known"),
    [
        ("blocks", "Adapter", {18}),
        ("blocks", "UnifiedAdapter", set()),
        ("scheduler", "Adapter", {17}),
        ("scheduler", "OverlapAdapter", {17}),
        ("scheduler", "MixedAdapter", {17}),
    ],
)
def test_nothing_is_found_but_what_the_report_says(findings, suite, name, known):
    """The order of eviction (18), and pages that are evicted without need (17): reports/cpu/sglang.md."""
    assert findings(suite, name, is_first_enough=False) <= known


def locks_are_not_taken(monkeypatch):
    from sglang.srt.mem_cache.base_prefix_cache import IncLockRefResult
    from sglang.srt.mem_cache.radix_cache import RadixCache

    monkeypatch.setattr(RadixCache, "inc_lock_ref", lambda self, node: IncLockRefResult(delta=0))
    monkeypatch.setattr(RadixCache, "dec_lock_ref", lambda self, node, params=None: None)


def duplicates_are_not_freed(monkeypatch):
    from sglang.srt.mem_cache.radix_cache import RadixCache

    insert = RadixCache._insert_cache

    def keep(self, request, *args, **named):
        before, request.kv.cache_protected_len = request.kv.cache_protected_len, 1 << 20
        result = insert(self, request, *args, **named)
        request.kv.cache_protected_len = before
        return result

    monkeypatch.setattr(RadixCache, "_insert_cache", keep)


def salt_is_left_out(monkeypatch):
    from sglang.srt.mem_cache.radix_cache import RadixKey

    build = RadixKey.__init__

    def without(self, *args, cache_salt=None, **named):
        build(self, *args, **named)

    monkeypatch.setattr(RadixKey, "__init__", without)


def a_page_is_handed_out_twice(monkeypatch):
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

    allocate = PagedTokenToKVPoolAllocator.alloc_decode

    def twice(self, *args, **named):
        pages = self.free_pages
        slots = allocate(self, *args, **named)
        self.free_pages = pages
        return slots

    monkeypatch.setattr(PagedTokenToKVPoolAllocator, "alloc_decode", twice)


@pytest.mark.parametrize(
    ("plant", "suite", "invariants"),
    [
        (locks_are_not_taken, "blocks", {1, 2, 3, 4, 5, 6, 8, 9, 11}),
        (duplicates_are_not_freed, "blocks", {1, 6}),
        (salt_is_left_out, "blocks", {3, 10, 14}),
        (a_page_is_handed_out_twice, "blocks", {1, 3, 4, 5}),
        (a_page_is_handed_out_twice, "scheduler", {1, 3, 4, 5}),
    ],
)
def test_a_bug_in_sglang_is_found(findings, monkeypatch, plant, suite, invariants):
    plant(monkeypatch)
    broken = findings(suite, "Adapter")
    assert len(broken) == 1
    assert broken <= invariants
