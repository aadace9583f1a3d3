from types import SimpleNamespace

import pytest
import torch

from harness.judge.explain.any_kind import generic
from harness.judge.explain.core.formats import cut_off

TAP = "model.layers.1.mlp.down_proj"


def test_gain_and_offset(bench):
    bench = bench()
    right = bench.tap(TAP)
    found = bench.explain(TAP, right * 1.25)
    assert found.cause == "a constant gain of 1.25"
    offset = torch.linspace(-1, 1, right.shape[1], dtype=torch.float64)
    assert bench.explain(TAP, right + offset).cause.startswith("a constant offset per channel, norm ")


@pytest.mark.parametrize(("power", "is_cause"), [(0, True), (2, False)])
def test_an_offset_must_hold_for_the_right_rows_of_the_same_steps(bench, power, is_cause):
    """An error that grows leaves its bound in the last rows only, and of these alone it looks constant."""
    bench = bench(dtype=torch.bfloat16)
    right, position = bench.tap(TAP), bench.rows(TAP).position.double()
    channels = torch.zeros(right.shape[1], dtype=torch.float64)
    channels[::5] = 0.0035 * right.norm(dim=1).mean()
    found = bench.explain(TAP, right + (position / position.max())[:, None] ** power * channels)
    assert found.is_cause == is_cause, found
    assert not is_cause or found.cause.startswith("a constant offset")


def test_rows_of_other_tokens(bench):
    bench = bench()
    right, rows = bench.tap(TAP), bench.rows(TAP)
    wrong = right.clone()
    first = (rows.request == 0) & (rows.position < 37)
    wrong[first] = right[first].roll(-1, dims=0)
    found = bench.explain(TAP, wrong)
    assert found.cause.startswith("the row is that of another token")
    assert "request 0, position 0 holds that of request 0, position 1" in found.detail


def test_heads_in_another_order(bench):
    bench = bench()
    tap = "model.layers.1.q_rope"
    heads = bench.tap(tap).unflatten(1, (-1, bench.head_dim))
    found = bench.explain(tap, heads.roll(1, dims=1).flatten(1))
    assert found.cause == "the heads are in another order: [5, 0, 1, 2, 3, 4]"


def test_another_input_and_another_output(bench):
    bench = bench()
    tap = "model.layers.1.self_attn.v_proj"
    stream = bench.tap("model.layers.0.output")
    found = bench.explain(tap, stream @ bench.weight(tap).T)
    assert found.cause == "it reads model.layers.0.output instead of input_layernorm"
    found = bench.explain("model.layers.1.output", bench.tap("model.layers.0.output"))
    assert found.cause == "the output is that of model.layers.0.output"


def test_a_coarser_result_or_input(bench):
    bench = bench()
    right = bench.tap(TAP)
    assert bench.explain(TAP, right.bfloat16().double()).cause == "the output is rounded to bfloat16"
    tap, source = "model.layers.1.input_layernorm", bench.tap("model.layers.0.output")
    low = source.bfloat16().double()
    normed = low * (low.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * bench.weight(tap)
    found = bench.explain(tap, normed)
    assert found.cause in ("its input is rounded to bfloat16", "the norm is computed in bfloat16")


def test_where_nothing_fits_it_says_what_it_sees(bench):
    bench = bench()
    wrong = bench.tap(TAP)
    generator = torch.Generator().manual_seed(3)
    wrong[:, 10:20] += torch.randn(len(wrong), 10, generator=generator, dtype=torch.float64)
    found = bench.explain(TAP, wrong)
    assert found.cause == "no known way to get it wrong fits"
    assert found.residual_after is None
    assert "only in elements 10 to 19 of 96" in found.detail


def test_growth_with_the_position_and_the_heads_that_carry_it(bench):
    bench = bench()
    tap = "model.layers.1.q_rope"
    wrong, rows = bench.tap(tap), bench.rows(tap)
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(len(wrong), bench.head_dim, generator=generator, dtype=torch.float64)
    wrong[:, : bench.head_dim] += rows.position[:, None] ** 2 * 1e-3 * noise
    found = bench.explain(tap, wrong)
    assert "only in heads 0 of 6" in found.detail
    assert "grows with the position" in found.detail


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_result_that_is_cut_off(bench, dtype):
    bench = bench()
    name = str(dtype).removeprefix("torch.")
    mantissa, exponent = torch.frexp(bench.tap(TAP))
    step = 2.0 ** (8 if dtype == torch.bfloat16 else 11)
    cut = torch.ldexp((mantissa * step).trunc() / step, exponent)
    found = bench.explain(TAP, cut.to(dtype).double())
    assert found.cause == f"the output is cut off to {name} instead of rounded"


def test_the_head_may_read_any_layer(bench):
    bench = bench()
    steps = bench.steps("lm_head")
    stream = torch.cat([step.tap("model.layers.1.output")[step.rows_of("lm_head")] for step in steps]).double()
    found = bench.explain("lm_head", stream @ bench.weight("lm_head").T)
    assert found.cause == "it reads model.layers.1.output instead of model.norm"


def test_the_last_row_of_the_step(bench):
    bench = bench()
    right, rows = bench.tap(TAP), bench.rows(TAP)
    last = torch.stack([(rows.step == step).nonzero()[-1, 0] for step in rows.step])
    found = bench.explain(TAP, right[last])
    assert found.cause == "the row is that of another token, the last one of its step"


def test_an_explanation_that_raises_costs_no_other(bench, monkeypatch):
    def broken(failure):
        raise ValueError("of this shape I know nothing")
        yield

    monkeypatch.setattr("harness.judge.explain.products.linear.EXPLANATIONS", (broken,))
    bench = bench()
    assert bench.explain(TAP, bench.tap(TAP) * 1.25).cause == "a constant gain of 1.25"
    noise = torch.randn(bench.tap(TAP).shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert "could not be tried: broken: ValueError" in bench.explain(TAP, noise).detail


def test_a_fitted_cause_with_the_numbers_of_an_unfitted_one_is_dropped(bench):
    """Of two tokens, the last one is the last piece of two: "only the last 1 tokens" is another name of it."""
    bench = bench(schedule="chunked")
    tap, rows = "model.layers.1.attention", bench.rows()
    first = (rows.request == 1) & (rows.position == 1)
    wrong = bench.tap(tap)
    wrong[first] = (
        bench.tap("model.layers.1.self_attn.v_proj")[first].unflatten(1, (2, -1)).repeat_interleave(3, 1).flatten(1)
    )
    found = bench.explain(tap, wrong)
    assert found.is_cause
    assert found.num_fitted == 0
    assert found.cause == "split KV: only the last piece counts"


def test_a_factor_that_differs_from_row_to_row_is_no_cause(bench):
    bench = bench(dtype=torch.bfloat16)
    right = bench.tap(TAP)
    factors = torch.linspace(1.02, 1.06, len(right), dtype=torch.float64)[:, None]
    found = bench.explain(TAP, right * factors)
    assert found.cause == "each row is scaled by a factor of its own"
    assert not found.is_cause
    assert bench.explain(TAP, right * 1.04).cause.startswith("a constant gain of 1.0")


@pytest.mark.parametrize(("numel", "cause"), [
    (31, "the output is rounded to bfloat16"), (32, "the output is cut off to bfloat16 instead of rounded"),
    (256, "the output is cut off to bfloat16 instead of rounded"),
])  # fmt: skip
def test_cutting_off_is_told_from_rounding_only_by_many_elements(numel, cause):
    expected = torch.randn(1, numel, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    actual = cut_off(expected, torch.bfloat16)
    (found,) = generic.rounded_output(SimpleNamespace(dtype=torch.float32, actual=actual, expected=expected))
    assert found.cause == cause


def test_an_offset_that_leaves_more_than_rounding_is_none(bench):
    """A slope of the activation looks like an offset, as far as the gate's mean goes."""
    bench = bench(dtype=torch.bfloat16)
    gate, up = (bench.tap(f"model.layers.0.mlp.{site}_proj") for site in ("gate", "up"))
    found = bench.explain("model.layers.0.mlp.act", gate * (1.1 * gate).sigmoid() * up)
    assert not found.is_cause, found


@pytest.mark.parametrize(("has_form", "is_cause"), [(True, True), (False, False)])
def test_a_gain_of_a_norm_that_could_be_its_eps(bench, monkeypatch, has_form, is_cause):
    if not has_form:
        monkeypatch.setattr(generic, "form_of", lambda failure: None)
    bench, tap = bench(), "model.layers.1.input_layernorm"
    assert bench.explain(tap, bench.tap(tap) * 1.01).is_cause == is_cause
