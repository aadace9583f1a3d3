"""Counts are exact: the same twice, and every planted regression is named by operation and operator."""

import sys
from collections import Counter

import pytest
import torch

from harness.profiling.counters import PhaseCounts, count
from harness.profiling.formulas import kv_bytes
from reference_engine.kv_cache import KVCache
from reference_engine.layers import MLP
from reference_engine.rotary import RotaryEmbedding


def changes(before: PhaseCounts, after: PhaseCounts, field: str = "count") -> dict[tuple[str, str], int]:
    """Return by how much a count of an operator in an operation has changed, where it has."""
    difference: Counter[tuple[str, str]] = Counter()
    for counts, sign in ((before, -1), (after, 1)):
        for one in counts.counts:
            difference[one.operation, one.operator] += sign * getattr(one, field)
    return {place: change for place, change in difference.items() if change}


@pytest.fixture(params=["prefill", "decode"])
def phase(request):
    return request.param


@pytest.fixture
def counted(open_on, find_window):
    """Count a phase of the reference engine as it is at this moment."""

    def counts(phase, **options):
        session = open_on("reference", **options)
        window = find_window(session, phase)
        return window, count(session, window)

    return counts


def test_two_counts_are_the_same(session, find_window, phase):
    window = find_window(session, phase)
    first, second = count(session, window), count(session, window)
    assert first.counts == second.counts
    assert (first.kv_bytes, first.num_python_calls) == (second.kv_bytes, second.num_python_calls)


def test_an_extra_copy_in_each_layer_is_found(counted, monkeypatch, phase):
    _, before = counted(phase)
    original = MLP.__call__
    monkeypatch.setattr(MLP, "__call__", lambda self, x, batch, prefix: original(self, x.clone(), batch, prefix))
    window, after = counted(phase)
    num_steps, num_rows = len(window.steps), sum(shape.num_rows for shape in window.shapes)
    assert changes(before, after) == {("mlp.gate_proj", "aten::clone"): 3 * num_steps}
    assert changes(before, after, "bytes_allocated") == {("mlp.gate_proj", "aten::clone"): 3 * num_rows * 96 * 4}
    assert after.num_python_calls == before.num_python_calls + 3 * num_steps


def test_a_cache_that_grows_by_cat_is_found(counted, monkeypatch, phase):
    window, before = counted(phase)
    original, grown = KVCache.store, {}

    def store(self, layer, k, v, slots):
        original(self, layer, k, v, slots)
        grown[layer] = torch.cat([grown[layer], k]) if layer in grown else k.clone()

    monkeypatch.setattr(KVCache, "store", store)
    _, after = counted(phase)
    assert changes(before, after).get(("attention", "aten::cat")) == 3 * len(window.steps)
    assert changes(before, after, "bytes_allocated")["attention", "aten::cat"] > 0


def test_a_synchronization_with_the_host_is_found(counted, monkeypatch, phase):
    window, before = counted(phase)
    original = RotaryEmbedding.__call__

    def rotate(self, positions):
        positions.sum().item()
        return original(self, positions)

    monkeypatch.setattr(RotaryEmbedding, "__call__", rotate)
    _, after = counted(phase)
    assert changes(before, after)["input_layernorm", "aten::_local_scalar_dense"] == len(window.steps)


def test_attention_without_a_cache_is_found(counted):
    window, before = counted("decode")
    _, after = counted("decode", attention_backend="recompute")
    assert after.kv_bytes == 0 < before.kv_bytes
    grown = changes(before, after, "flops")
    assert min(grown.values()) > 0, "every product is computed for the whole prefix"
    context_lens = [sum(shape.context_lens) for shape in window.shapes]
    assert grown["self_attn.o_proj", "aten::mm"] == 3 * 2 * 192 * 96 * sum(total - 2 for total in context_lens)


def test_attention_without_a_cache_leaves_other_phases_alone(counted):
    _, before = counted("prefill")
    _, after = counted("prefill", attention_backend="recompute")
    assert changes(before, after, "flops") == {}


def test_kv_bytes_are_those_of_all_tokens_so_far(session, find_window, phase):
    window = find_window(session, phase)
    assert count(session, window).kv_bytes == kv_bytes(session.model, window.shapes_so_far)


def test_whoever_listens_to_python_calls_listens_again(reference, find_window):
    def listener(_frame, _event, _argument):
        return None

    window = find_window(reference, "prefill")
    before = sys.getprofile()
    sys.setprofile(listener)
    try:
        count(reference, window)
        assert sys.getprofile() is listener
    finally:
        sys.setprofile(before)
