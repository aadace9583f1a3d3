"""The roofs, and what stands under them."""

from types import SimpleNamespace

import pytest
import torch

from harness.profiling import profile
from harness.profiling.formulas import Cost
from harness.profiling.roofline import best_of, bound_by, fold, measure_ceilings, point
from harness.profiling.trace.tables import PhaseTables
from harness.results.profile import BoundBy, Ceilings, TableRow

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
    placed = point("x", Cost(site="x", flops=300, bytes_moved=100), 5.0, CEILINGS)
    assert (placed.intensity, placed.time_us) == (3.0, 5.0)
    assert point("x", Cost(site="x"), 5.0, CEILINGS).intensity == 0


def test_operations_computed_in_one_are_summed_up():
    names = ("self_attn.q_proj", "self_attn.k_proj", "k_cache", "v_cache", "attention", "lm_head")
    costs = {name: Cost(site=name, flops=1, bytes_moved=2) for name in names}
    folded = fold(costs, {"self_attn.q_proj", "attention", "lm_head"})
    assert {name: cost.flops for name, cost in folded.items()} == {"self_attn.q_proj": 2, "attention": 3, "lm_head": 1}
    assert {name: cost.site for name, cost in folded.items()} == {name: name for name in folded}
    assert fold(costs, set(costs)) == costs


def test_ceilings_are_measured():
    measured = measure_ceilings(torch.float32, "cpu", num_bytes=1 << 16, matrix_size=32)
    assert measured.copy_bytes_per_s > 0
    assert measured.matmul_flops_per_s > 0


def test_the_higher_roof_counts():
    faster_copies = Ceilings(copy_bytes_per_s=2e9, matmul_flops_per_s=1e11)
    assert best_of(CEILINGS, faster_copies) == Ceilings(copy_bytes_per_s=2e9, matmul_flops_per_s=1e12)


@pytest.mark.parametrize(("device_us", "expected"), [(None, {"a": 50.0, "b": 7.0}), (3.0, {"a": 3.0, "b": 3.0})])
def test_on_a_gpu_the_time_of_kernels_counts_not_that_of_their_launches(device_us, expected):
    rows = [
        TableRow(name=name, calls=1, total_us=total_us, self_us=total_us, share=0.1, device_us=device_us)
        for name, total_us in (("a", 50.0), ("b", 7.0))
    ]
    rows.append(TableRow(name="c", calls=1, total_us=1.0, self_us=1.0, share=0.1, device_us=device_us and 0.0))
    phase_tables = PhaseTables(wall_us=58, attributed_share=1, layers=(), operations=tuple(rows), operators=())
    points = profile._points(phase_tables, {name: Cost(site=name, flops=1) for name in "abc"}, CEILINGS)
    times = {one.name: one.time_us for one in points}
    assert times == (expected | {"c": 1.0} if device_us is None else expected), (
        "an operation without a kernel has no roof"
    )


@pytest.mark.parametrize(
    ("times_s", "cpu_s", "said"),
    [
        ((1.0, 1.0, 1.1), 1.0, None),
        ((1.0, 1.0, 1.4), None, "times vary"),
        ((1.4, 1.4, 1.4), 1.0, "the machine was busy"),
    ],
)
def test_a_busy_machine_is_noted(times_s, cpu_s, said):
    phase_pass = SimpleNamespace(tables=SimpleNamespace(attributed_share=1.0))
    notes = profile._notes(phase_pass, *times_s, cpu_s)
    assert [note.startswith(said) for note in notes] == ([True] if said else [])
