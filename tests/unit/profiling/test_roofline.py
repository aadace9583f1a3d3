"""The roofs, and what stands under them."""

import pytest
import torch

from harness.profile_results import BoundBy, Ceilings
from harness.profiling.ceilings import best_of, measure_ceilings
from harness.profiling.formulas import Cost
from harness.profiling.roofline import bound_by, fold, point

CEILINGS = Ceilings(copy_bytes_per_s=1e9, matmul_flops_per_s=1e12)


@pytest.mark.parametrize(
    ("flops", "bytes_moved", "time_s", "expected"),
    [
        (10**12, 10**6, 2.0, BoundBy.COMPUTE),
        (10**6, 10**9, 2.0, BoundBy.MEMORY),
        (10**12, 10**6, 11.0, BoundBy.OVERHEAD),
        (0, 0, 1.0, BoundBy.OVERHEAD),
    ],
)
def test_what_bounds(flops, bytes_moved, time_s, expected):
    assert bound_by(flops, bytes_moved, time_s, CEILINGS) is expected


def test_a_point_has_its_intensity():
    found = point("x", Cost(site="x", flops=300, bytes_moved=100), 5.0, CEILINGS)
    assert (found.intensity, found.time_us) == (3.0, 5.0)
    assert point("x", Cost(site="x"), 5.0, CEILINGS).intensity == 0


def test_operations_computed_in_one_are_summed_up():
    names = ("self_attn.q_proj", "self_attn.k_proj", "k_cache", "v_cache", "attention", "lm_head")
    costs = {name: Cost(site=name, flops=1, bytes_moved=2) for name in names}
    folded = fold(costs, {"self_attn.q_proj", "attention", "lm_head"})
    assert {name: cost.flops for name, cost in folded.items()} == {"self_attn.q_proj": 2, "attention": 3, "lm_head": 1}
    assert {name: cost.site for name, cost in folded.items()} == {name: name for name in folded}
    assert fold(costs, set(costs)) == costs


def test_ceilings_are_measured():
    found = measure_ceilings(torch.float32, "cpu", num_bytes=1 << 16, matrix_size=32)
    assert found.copy_bytes_per_s > 0
    assert found.matmul_flops_per_s > 0


def test_the_higher_roof_counts():
    other = Ceilings(copy_bytes_per_s=2e9, matmul_flops_per_s=1e11)
    assert best_of(CEILINGS, other) == Ceilings(copy_bytes_per_s=2e9, matmul_flops_per_s=1e12)
