"""The formulas against what the engines dispatch, operation by operation, and against pairs counted one by one."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines.hf import HFSession
from harness.profiling.counters import PhaseCounts, count
from harness.profiling.formulas import causal_pairs, kv_bytes, operation_costs, visible_pairs
from harness.profiling.load import CaptureSchedule, ProfileRequests, dry_run, window
from harness.profiling.roofline import fold

EVERYTHING = CaptureSchedule(wait=0, warmup=0, active=100)
LINEARS = ("self_attn.o_proj", "mlp.down_proj")
"""Computed by themselves in both engines, so that their bytes can be compared too."""


def by_operation(counts: PhaseCounts, field: str) -> Counter[str]:
    sums: Counter[str] = Counter()
    for one in counts.counts:
        sums[one.operation] += getattr(one, field)
    return sums


def windows(session, load):
    steps = dry_run(session, load)
    return [window(phase, load, steps, EVERYTHING) for phase in sorted({step.shape.phase for step in steps})]


def assert_counters_equal_formulas(session, load, *, moves_equal: bool = True):
    for phase_window in windows(session, load):
        counts = count(session, phase_window)
        costs = operation_costs(session.model, phase_window.shapes)
        measured = by_operation(counts, "flops")
        folded = fold(costs, measured)
        assert {name: cost.flops for name, cost in folded.items()} == {name: measured[name] for name in folded}
        assert counts.flops == sum(cost.flops for cost in costs.values())
        assert counts.kv_bytes == kv_bytes(session.model, phase_window.shapes_so_far)
        moved = by_operation(counts, "bytes_moved")
        if moves_equal:
            assert {name: folded[name].bytes_moved for name in LINEARS} == {name: moved[name] for name in LINEARS}


def test_counters_equal_formulas(session, load):
    assert_counters_equal_formulas(session, load)


@pytest.mark.parametrize("engine", ["reference", "hf"])
@pytest.mark.parametrize(("model", "dtype"), [("llama-tiny", "float32"), ("qwen2-tiny", "bfloat16")])
def test_counters_equal_formulas_for_other_families(open_on, load, engine, model, dtype):
    assert_counters_equal_formulas(open_on(engine, model=model, dtype=dtype), load)


@pytest.mark.parametrize("model", ["gemma3-tiny", "qwen3-moe-tiny"])
def test_counters_equal_formulas_for_norms_behind_and_experts(open_on, load, model):
    """Gemma's norms compute in another order, and a router's sums have no counter: products alone are compared."""
    assert_counters_equal_formulas(open_on("reference", model=model, dtype="float32"), load, moves_equal=False)


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 7}, {"attention_backend": "contiguous"}])
def test_counters_equal_formulas_under_other_options(open_on, load, options):
    assert_counters_equal_formulas(open_on("reference", **options), load)


def test_counters_equal_formulas_where_prompts_mix_with_decoded_tokens(reference):
    late = ProfileRequests(
        prompts=(tuple(range(10, 34)), tuple(range(20, 40))), max_new_tokens=(6, 6), late=tuple(range(5, 20))
    )
    assert "mixed" in {phase_window.phase for phase_window in windows(reference, late)}
    assert_counters_equal_formulas(reference, late)


def test_pointwise_work_equals_its_formula(open_on, load):
    session = open_on("hf")
    (decode, prefill) = windows(session, load)
    for phase_window in (decode, prefill):
        measured = by_operation(count(session, phase_window), "elementwise_flops")
        costs = fold(operation_costs(session.model, phase_window.shapes), measured)
        assert {name: cost.elementwise_flops for name, cost in costs.items()} == {
            name: measured[name] for name in costs
        }


def test_formulas_know_the_window_that_the_config_gives_all_layers(tiny):
    session = HFSession(tiny("mistral"), "sdpa")
    assert session.model.windows == (5, 5)
    for phase_window in windows(session, ProfileRequests(prompts=(tuple(range(10, 22)),), max_new_tokens=(4,))):
        costs = operation_costs(session.model, phase_window.shapes)
        assert count(session, phase_window).flops == sum(cost.flops for cost in costs.values())


def counted(num_queries: int, context_len: int, window: int | None) -> int:
    positions = range(context_len - num_queries, context_len)
    return sum(key <= position and (window is None or key > position - window)
               for position in positions for key in range(context_len))  # fmt: skip


@given(st.integers(1, 12), st.integers(0, 12), st.none() | st.integers(1, 16))
def test_the_formula_is_what_counting_gives(num_queries: int, num_before: int, window: int | None):
    context_len = num_queries + num_before
    assert visible_pairs(num_queries, context_len, window) == counted(num_queries, context_len, window)


@pytest.mark.parametrize(("num_queries", "context_len", "expected"), [(4, 4, 10), (1, 9, 9), (2, 5, 9)])
def test_a_chunk_is_a_rectangle_and_a_triangle(num_queries: int, context_len: int, expected: int):
    assert causal_pairs(num_queries, context_len) == expected
