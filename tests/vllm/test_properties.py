"""vLLM's own KV cache manager and schedulers under the property suites: they pass, and bugs put into them are found."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.request import Request

from harness.properties.blocks import search_block_manager
from harness.properties.core.search import PROFILES
from harness.properties.scheduler import search_scheduler

from .faults import wrapped

pytestmark = pytest.mark.slow
ADAPTERS = Path(__file__).parents[2] / "docs" / "adapters" / "vllm"
SEARCHES = {"blocks": search_block_manager, "scheduler": search_scheduler}
EVERY = [("blocks", name) for name in ("Adapter", "WindowAdapter")]
EVERY += [("scheduler", name) for name in ("Adapter", "AsyncAdapter", "WindowAdapter", "AsyncWindowAdapter")]


@pytest.fixture
def findings(monkeypatch):
    """Return a function: the invariants that a search with an adapter of docs/adapters/vllm finds broken."""
    monkeypatch.syspath_prepend(ADAPTERS)

    def find(suite, name, *, is_first_enough=True):
        adapter = getattr(importlib.import_module(suite), name)
        report = SEARCHES[suite](adapter, PROFILES["dev"].settings(), is_first_enough=is_first_enough)
        return [finding.invariant for finding in report.findings]

    return find


@pytest.mark.parametrize(("suite", "name"), EVERY)
def test_vllm_passes(findings, suite, name):
    assert findings(suite, name, is_first_enough=False) == []


def hits_are_not_counted(monkeypatch):
    monkeypatch.setattr(BlockPool, "touch", lambda self, blocks: None)


def preempted_goes_last(monkeypatch):
    monkeypatch.setattr(FCFSRequestQueue, "prepend_request", FCFSRequestQueue.add_request)


def one_request_too_many(monkeypatch):
    def build(before, self, *args, **named):
        before(self, *args, **named)
        self.max_num_active_reqs += 1

    wrapped(monkeypatch, Scheduler, "__init__", build)


def window_is_one_too_short(monkeypatch):
    def skip(before, self, num_computed_tokens):
        return before(self, num_computed_tokens + 1)

    wrapped(monkeypatch, SlidingWindowManager, "get_num_skipped_tokens", skip)


def salt_is_left_out(monkeypatch):
    def build(before, self, *args, cache_salt=None, **named):
        before(self, *args, **named)

    wrapped(monkeypatch, Request, "__init__", build)


def stale_output_counts(monkeypatch):
    """What a preempted request had in flight is taken for an output of its new run."""

    def update(before, self, request, new_token_ids, is_stale=False):
        return before(self, request, new_token_ids, is_stale=False)

    wrapped(monkeypatch, AsyncScheduler, "_update_request_with_output", update)


@pytest.mark.parametrize(
    ("plant", "suite", "name", "invariants"),
    [
        (hits_are_not_counted, "blocks", "Adapter", {2, 3, 4}),
        (hits_are_not_counted, "scheduler", "Adapter", {1, 2, 3, 4, 5, 7, 21}),
        (salt_is_left_out, "blocks", "Adapter", {3, 10, 14}),
        (window_is_one_too_short, "blocks", "WindowAdapter", {5, 7}),
        (window_is_one_too_short, "scheduler", "WindowAdapter", {5, 7}),
        (preempted_goes_last, "scheduler", "Adapter", {22}),
        (one_request_too_many, "scheduler", "AsyncAdapter", {20, 21}),
        (stale_output_counts, "scheduler", "AsyncAdapter", {23}),
    ],
)
def test_a_bug_in_vllm_is_found(findings, monkeypatch, plant, suite, name, invariants):
    plant(monkeypatch)
    broken = findings(suite, name)
    assert len(broken) == 1
    assert broken[0] in invariants
