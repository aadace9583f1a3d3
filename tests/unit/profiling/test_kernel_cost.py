"""What the engine's own kernels cost: by hand, and against the formulas for a whole engine under the interpreter."""

import pytest
import torch

from harness.profiling import counters
from harness.profiling.counters import count
from harness.profiling.formulas import kv_bytes, operation_costs
from harness.profiling.load import ProfileRequests
from harness.profiling.operator_cost import KERNELS, written_bytes
from reference_engine.fast.cpp_operators import find_compiler

from ..reference_engine.fast.kernels.launching import IGNORE_NUMPY, launch_on

CACHE = torch.zeros(9, 4, 2, 8)


def cost(name, **arguments):
    cost = KERNELS[f"reference_engine::{name}"]
    return cost.flops(arguments), cost.elementwise_flops(arguments), cost.bytes_moved(arguments)


def test_decode_reads_each_requests_keys():
    q, lens = torch.zeros(3, 6, 8), torch.tensor([5, 0, 20])
    flops, _, moved = cost("paged_decode", q=q, k_cache=CACHE, context_lens=lens)
    assert flops == 4 * (5 + 20) * 6 * 8
    assert moved == (2 * 2 * 6 * 8 + 25 * 2 * 2 * 8) * 4
    flops, _, moved = cost("paged_decode", q=q, k_cache=CACHE, context_lens=lens, window=7)
    assert (flops, moved) == (4 * (5 + 7) * 6 * 8, (2 * 2 * 6 * 8 + 12 * 2 * 2 * 8) * 4)


def test_prefill_puts_tiles_together():
    # Request 0: rows 0 to 4 from position 3 on, in tiles of 4; request 1: one tile of 2 from position 0 on.
    tiles = torch.tensor([[0, 0, 4, 3], [0, 4, 1, 7], [1, 5, 2, 0]], dtype=torch.int32)
    q = torch.zeros(7, 6, 8)
    flops, _, moved = cost("paged_prefill", q=q, k_cache=CACHE, tiles=tiles)
    assert flops == 4 * ((4 + 5 + 6 + 7 + 8) + (1 + 2)) * 6 * 8
    assert moved == (7 * 2 * 6 * 8 + (8 + 2) * 2 * 2 * 8) * 4
    flops, _, moved = cost("paged_prefill", q=q, k_cache=CACHE, tiles=tiles, window=2)
    assert flops == 4 * (5 * 2 + (1 + 2)) * 6 * 8
    assert moved == (7 * 2 * 6 * 8 + (6 + 2) * 2 * 2 * 8) * 4


def test_the_store_writes_what_it_reads():
    k, slots = torch.zeros(3, 2, 8), torch.zeros(3, dtype=torch.int64)
    arguments = {"k": k, "v": k, "slots": slots, "k_cache": CACHE, "v_cache": CACHE}
    assert cost("store_kv", **arguments)[2] == 4 * k.nbytes + slots.nbytes
    assert written_bytes("reference_engine::store_kv", arguments, "k_cache") == k.nbytes


@pytest.mark.sampled(1)
@IGNORE_NUMPY
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_engine_of_kernels_counts_what_the_formulas_say(open_on, find_window, monkeypatch, phase):
    launch_on("cpu", monkeypatch)
    monkeypatch.setattr(counters, "_count_python_calls", lambda *_: 0)  # the interpreter makes very many
    session = open_on("reference", attention_backend="triton")
    window = find_window(session, phase, ProfileRequests(prompts=((1, 2, 3),), max_new_tokens=(2,)), wait=0, warmup=0)
    counts = count(session, window)
    costs = operation_costs(session.model, window.shapes)
    assert counts.flops == sum(cost.flops for cost in costs.values())
    assert counts.kv_bytes == kv_bytes(session.model, window.shapes_so_far)
    (attention,) = [count for count in counts.counts if count.operator == f"reference_engine::paged_{phase}"]
    assert (attention.operation, attention.flops) == ("attention", costs["attention"].flops)
    assert attention.bytes_moved == costs["attention"].bytes_moved
    norms = [count for count in counts.counts if count.operator == "reference_engine::add_norm"]
    assert {count.operation for count in norms} == {"attn_residual", "output"}


@pytest.mark.parametrize("rows", [1, 5])
def test_a_product_of_few_rows_reads_its_weight_once(rows):
    x, weight, bias = torch.zeros(rows, 40), torch.zeros(6, 40), torch.zeros(6)
    assert cost("linear", x=x, weight=weight, bias=None) == (rows * 2 * 6 * 40, 0, (rows * 40 + 6 * 40 + rows * 6) * 4)
    assert cost("linear", x=x, weight=weight, bias=bias)[2] == (rows * 40 + 6 * 40 + rows * 6 + 6) * 4


@pytest.mark.slow
@pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_engine_of_cpp_kernels_counts_what_the_formulas_say(open_on, find_window, phase):
    session = open_on("reference", attention_backend="cpp")
    window = find_window(session, phase, ProfileRequests(prompts=((1, 2, 3),), max_new_tokens=(2,)), wait=0, warmup=0)
    counts = count(session, window)
    costs = operation_costs(session.model, window.shapes)
    assert counts.flops == sum(cost.flops for cost in costs.values())
