"""What single operators cost, as they are dispatched."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from harness.profiling.operator_cost import bind, bytes_moved, elementwise_flops, flops, storages


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
