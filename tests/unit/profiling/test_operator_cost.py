"""What single operators cost, as they are dispatched: torch's, and the kernels of the reference engine."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from harness.profiling import counters
from harness.profiling.counters import count
from harness.profiling.formulas import kv_bytes, operation_costs
from harness.profiling.load import ProfileRequests
from harness.profiling.operator_cost import (
    KERNELS,
    bind,
    bytes_moved,
    elementwise_flops,
    flops,
    storages,
    written_bytes,
)
from reference_engine.fast.cpp_operators import find_compiler

from ..reference_engine.fast.kernels.launching import IGNORE_NUMPY, launch_on


class Costs(TorchDispatchMode):
    """Adds up the costs of what is dispatched in its block."""

    def __init__(self):
        super().__init__()
        self.flops = self.elementwise = self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        arguments, name = bind(func, args, kwargs or {}), func._schema.name
        result = func(*args, **(kwargs or {}))
        self.flops += flops(name, arguments)
        self.elementwise += elementwise_flops(func, name, arguments, result)
        self.moved += bytes_moved(func, name, arguments, result)
        return result


def cost(work):
    with torch.no_grad(), Costs() as costs:
        work()
    return costs


def heads(num_rows: int) -> torch.Tensor:
    return torch.ones(2, 3, num_rows, 8)


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "options", "num_pairs"),
    [
        (4, 4, {}, 16),
        (4, 4, {"is_causal": True}, 10),
        (1, 9, {}, 9),
        (3, 5, {"attn_mask": torch.ones(3, 5, dtype=torch.bool).tril(2)}, 3 + 4 + 5),
        (3, 5, {"attn_mask": torch.zeros(3, 5).masked_fill(torch.ones(3, 5, dtype=torch.bool).triu(1), -torch.inf)}, 6),
    ],
)
def test_attention_costs_what_its_mask_keeps(num_queries, num_keys, options, num_pairs):
    counted = cost(
        lambda: scaled_dot_product_attention(heads(num_queries), heads(num_keys), heads(num_keys), **options)
    )
    assert counted.flops == 2 * 3 * num_pairs * 4 * 8


def test_products():
    left, right = torch.ones(4, 6), torch.ones(6, 5)
    assert cost(lambda: left @ right).flops == 2 * 4 * 6 * 5
    assert cost(lambda: torch.nn.functional.linear(left, right.T, torch.ones(5))).flops == 2 * 4 * 6 * 5
    assert cost(lambda: torch.ones(3, 4, 6) @ torch.ones(3, 6, 5)).flops == 3 * 2 * 4 * 6 * 5


def test_a_product_in_onednns_own_layout():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.ones(512, 64), 4)
    counted = cost(lambda: torch.ops.mkldnn._linear_pointwise(torch.ones(4, 64), packed, None, "none", [], ""))
    assert counted.flops == 2 * 4 * 64 * 512
    ((address, num_bytes),) = storages([packed]).items()
    assert address > 0
    assert num_bytes >= 512 * 64 * 4


def test_an_outer_product_sums_nothing_up():
    left, right = torch.ones(4, 1), torch.ones(1, 5)
    counted = cost(lambda: left @ right)
    assert (counted.flops, counted.elementwise) == (0, 4 * 5)


def test_bytes_are_those_that_have_to_move():
    table, rows, source = torch.ones(100, 4), torch.tensor([3, 5]), torch.ones(2, 4)
    assert cost(lambda: table.view(4, 100)).moved == 0
    assert cost(lambda: table + 1).moved == 2 * 1600
    assert cost(lambda: table.index_select(0, rows)).moved == 2 * 32 + 16
    assert cost(lambda: table.index_copy_(0, rows, source)).moved == 2 * 32 + 16


def test_reductions_read_their_input_and_copies_compute_nothing():
    numbers = torch.ones(6, 4)
    assert cost(lambda: numbers.mean(-1)).elementwise == 24
    assert cost(lambda: numbers.clone()).elementwise == 0
    assert cost(lambda: numbers.to(torch.bfloat16)).elementwise == 0


def test_an_allocation_moves_no_bytes():
    assert cost(lambda: torch.empty(1000)).moved == 0
    assert cost(lambda: torch.ones(10).new_empty(1000)).moved == cost(lambda: torch.ones(10)).moved
    assert cost(lambda: torch.zeros(1000)).moved > 0


CACHE = torch.zeros(9, 4, 2, 8)


def kernel_cost(name, **arguments):
    kernel = KERNELS[f"reference_engine::{name}"]
    return kernel.flops(arguments), kernel.elementwise_flops(arguments), kernel.bytes_moved(arguments)


def test_decode_reads_each_requests_keys():
    q, lens = torch.zeros(3, 6, 8), torch.tensor([5, 0, 20])
    flops, _, moved = kernel_cost("paged_decode", q=q, k_cache=CACHE, context_lens=lens)
    assert flops == 4 * (5 + 20) * 6 * 8
    assert moved == (2 * 2 * 6 * 8 + 25 * 2 * 2 * 8) * 4
    flops, _, moved = kernel_cost("paged_decode", q=q, k_cache=CACHE, context_lens=lens, window=7)
    assert (flops, moved) == (4 * (5 + 7) * 6 * 8, (2 * 2 * 6 * 8 + 12 * 2 * 2 * 8) * 4)


def test_prefill_puts_tiles_together():
    # Request 0: rows 0 to 4 from position 3 on, in tiles of 4; request 1: one tile of 2 from position 0 on.
    tiles = torch.tensor([[0, 0, 4, 3], [0, 4, 1, 7], [1, 5, 2, 0]], dtype=torch.int32)
    q = torch.zeros(7, 6, 8)
    flops, _, moved = kernel_cost("paged_prefill", q=q, k_cache=CACHE, tiles=tiles)
    assert flops == 4 * ((4 + 5 + 6 + 7 + 8) + (1 + 2)) * 6 * 8
    assert moved == (7 * 2 * 6 * 8 + (8 + 2) * 2 * 2 * 8) * 4
    flops, _, moved = kernel_cost("paged_prefill", q=q, k_cache=CACHE, tiles=tiles, window=2)
    assert flops == 4 * (5 * 2 + (1 + 2)) * 6 * 8
    assert moved == (7 * 2 * 6 * 8 + (6 + 2) * 2 * 2 * 8) * 4


def test_the_store_writes_what_it_reads():
    k, slots = torch.zeros(3, 2, 8), torch.zeros(3, dtype=torch.int64)
    arguments = {"k": k, "v": k, "slots": slots, "k_cache": CACHE, "v_cache": CACHE}
    assert kernel_cost("store_kv", **arguments)[2] == 4 * k.nbytes + slots.nbytes
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
    assert kernel_cost("linear", x=x, weight=weight, bias=None) == (
        rows * 2 * 6 * 40,
        0,
        (rows * 40 + 6 * 40 + rows * 6) * 4,
    )
    assert kernel_cost("linear", x=x, weight=weight, bias=bias)[2] == (rows * 40 + 6 * 40 + rows * 6 + 6) * 4


@pytest.mark.slow
@pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_engine_of_cpp_kernels_counts_what_the_formulas_say(open_on, find_window, phase):
    session = open_on("reference", attention_backend="cpp")
    window = find_window(session, phase, ProfileRequests(prompts=((1, 2, 3),), max_new_tokens=(2,)), wait=0, warmup=0)
    counts = count(session, window)
    costs = operation_costs(session.model, window.shapes)
    assert counts.flops == sum(cost.flops for cost in costs.values())
