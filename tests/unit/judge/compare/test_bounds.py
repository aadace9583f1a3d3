"""How large a local error may be: derived where the kind is known, by the control where it is not."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.base.metrics import largest_rounding, rounding_unit
from harness.base.numerics import Numerics
from harness.formats.taps import KINDS, ErrorModel, Kind
from harness.judge.compare.bounds import CONTROL_FACTOR, Sensitivity, control_bound, derived_bound
from harness.judge.compare.row_judge import RowJudge
from harness.results.check import Verdict

from .judgements import tap

_SAMPLES = 400
_EPS = 1e-6
ROW = (2, 8)


# The formula of how far rounding carries in a product, against roundings that were made.


def amplification(one, name, x):
    """What the judge takes for the amplification of a linear module's rows, and what they should be."""
    judge = RowJudge(one.hf, torch.float32, set(), Numerics())
    module = one.hf.module(name)
    with torch.no_grad():
        expected = nn.functional.linear(
            x, module.weight.double(), None if module.bias is None else module.bias.double()
        )
    rows = SimpleNamespace(operation=one.hf.graph[name], inputs=lambda: [x], expected=expected)
    return judge._linear_sensitivity(rows).amplification, expected


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_amplification_of_a_linear_is_the_error_of_its_rounded_products(bench, mean):
    one, name = bench("qwen2-tiny"), "model.layers.1.self_attn.k_proj"
    module = one.hf.module(name)
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(4, module.in_features, generator=generator, dtype=torch.float64) + mean
    sensitivity, expected = amplification(one, name, x)
    products = x[:, None, :] * module.weight.detach().double()  # [rows, out, in]
    noise = (
        (products * (1 + _EPS * torch.randn(products.shape, generator=generator, dtype=torch.float64))).sum(-1)
        for _ in range(_SAMPLES)
    )
    bias = module.bias.detach().double()
    errors = torch.stack([(y + bias - expected).norm(dim=-1) / expected.norm(dim=-1) for y in noise])
    measured = errors.square().mean(dim=0).sqrt() / _EPS
    torch.testing.assert_close(sensitivity, measured, rtol=0.2, atol=0)


def test_a_row_whose_products_cancel_is_amplified(bench):
    one, name = bench("llama-tiny"), "model.layers.0.mlp.down_proj"
    weight = one.hf.module(name).weight.detach().double()
    directions = torch.linalg.svd(weight).Vh  # wider than it is high: the last ones are mapped to zero
    sensitivity, _ = amplification(one, name, directions[[-1, 0]])
    assert sensitivity[0] > 1e6
    assert sensitivity[1] < 3


def test_weights_of_the_other_orientation_are_amplified_alike(bench):
    """GPT-2 keeps its weights as [in, out]."""
    one, name = bench("gpt2"), "transformer.h.0.mlp.c_fc"
    module = one.hf.module(name)
    x = torch.randn(3, module.weight.shape[0], dtype=torch.float64)
    judge = RowJudge(one.hf, torch.float32, set(), Numerics())
    expected = x @ module.weight.detach().double() + module.bias.detach().double()
    rows = SimpleNamespace(operation=one.hf.graph[name], inputs=lambda: [x], expected=expected)
    products = x[:, :, None] * module.weight.detach().double()
    by_hand = products.square().sum(dim=(1, 2)).sqrt() / expected.norm(dim=1)
    torch.testing.assert_close(judge._linear_sensitivity(rows).amplification, by_hand, rtol=1e-6, atol=0)


# Derived bounds.

ROWS = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_one_rounding_never_exceeds_its_bound():
    for dtype in (torch.bfloat16, torch.float16):
        error = (ROWS.to(dtype).double() - ROWS).norm(dim=1) / ROWS.norm(dim=1) / rounding_unit(dtype)
        bound = derived_bound(ErrorModel(roundings=1), dtype, Sensitivity(), ROWS)
        assert bool((error <= bound).all())
        assert bool((bound < 4 * error).all())


def test_what_is_copied_may_not_differ():
    for kind in (Kind.EMBEDDING, Kind.COPY, Kind.CACHE):
        assert derived_bound(KINDS[kind].error_model, torch.bfloat16, Sensitivity(), ROWS).tolist() == [0, 0, 0]


def test_rows_below_the_smallest_normal_number_have_room_for_an_absolute_rounding():
    tiny = ROWS * 1e-7
    bound = derived_bound(ErrorModel(roundings=1), torch.float16, Sensitivity(), tiny)
    error = (tiny.half().double() - tiny).norm(dim=1) / tiny.norm(dim=1) / rounding_unit(torch.float16)
    assert bool((error > 4 * largest_rounding(torch.float16)).all())
    assert bool((error <= bound).all())


# Bounds by the control.


def test_an_unknown_kind_is_bounded_by_its_control(bench, tmp_path):
    one = bench("mamba", torch.bfloat16)
    name = "backbone.layers.1.mixer.out_proj.input"  # the scan
    recorded = one.comparison(one.recorded("plain").write(tmp_path / "a"))
    errors = recorded.errors[name]
    assert errors.is_bounded_by_control
    assert bool((errors.bound >= CONTROL_FACTOR * errors.control).all())
    assert not recorded.errors["backbone.layers.1.mixer.out_proj"].is_bounded_by_control
    actual = one.recorded("plain")
    row = actual.at(name, *ROW)
    row += torch.randn(row.shape, generator=torch.Generator().manual_seed(3)).to(row.dtype) * row.norm()
    result = one.compare(actual.write(tmp_path / "b"))
    assert tap(result, name).verdict is Verdict.BUG
    assert tap(result, name).num_bad_rows == 1


class Coarse(nn.Linear):
    """A product whose inputs are rounded to eight bits: what some family may well do, and no kind's model allows."""

    def forward(self, x):
        return super().forward(x.to(torch.float8_e4m3fn).to(x.dtype) if x.dtype == self.engine_dtype else x)


def test_a_module_of_hfs_that_rounds_more_than_its_kind_is_bounded_by_its_control(bench, tmp_path):
    one, name = bench("mistral", torch.bfloat16), "model.layers.1.mlp.down_proj"
    module = one.hf.module(name)
    plain = type(module)
    try:
        module.__class__, module.engine_dtype = Coarse, torch.bfloat16
        actual = one.recorded()
        for step in actual.computing():
            with torch.no_grad():
                step.taps[name] = module(step.taps["model.layers.1.mlp.act"])
        comparison = one.comparison(actual.write(tmp_path / "a"))
        errors = comparison.errors[name]
        assert float(errors.roundings.max()) > 3 * largest_rounding(torch.bfloat16)
        assert errors.is_bounded_by_control
        assert not bool(errors.bad.any())
        actual.at(name, *ROW).mul_(3)
        assert one.comparison(actual.write(tmp_path / "b")).errors[name].bad.sum() == 1
    finally:
        module.__class__ = plain
        del module.engine_dtype
    assert one.comparison(actual.write(tmp_path / "c")).errors[name].bad.sum() > 3, "and without it they are bugs"


def test_a_row_whose_scores_amplify_nothing_has_no_room_for_them():
    model, expected = ErrorModel(roundings=1, scores=5), torch.ones(3, 4, dtype=torch.float64)
    without = derived_bound(ErrorModel(roundings=1), torch.float32, Sensitivity(), expected)
    assert torch.equal(derived_bound(model, torch.float32, Sensitivity(), expected), without)
    assert (derived_bound(model, torch.float32, Sensitivity(score_sensitivity=torch.ones(3)), expected) > without).all()


# Figures by hand.

FLOAT16_STEP = 2.0**-24
"""The distance of neighbours below the smallest normal number."""


@pytest.mark.parametrize("norm", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("shape", [(1, 1), (2, 9), (2, 3, 3)])
def test_room_for_subnormal_numbers_by_hand(norm, shape):
    """One step for each element, as a share of the row's norm, in roundings."""
    expected = torch.ones(shape, dtype=torch.float64)
    width = expected[0].numel()
    expected *= norm / math.sqrt(width)
    bound = derived_bound(ErrorModel(roundings=1), torch.float16, Sensitivity(), expected)
    steps = math.sqrt(width) * FLOAT16_STEP / norm / rounding_unit(torch.float16)
    assert bound.tolist() == pytest.approx([largest_rounding(torch.float16) + steps] * shape[0], rel=1e-12)


def test_a_row_of_zeros_has_no_room_for_subnormal_numbers():
    expected = torch.tensor([[0.0, 0.0], [1e-6, 0.0]], dtype=torch.float64)
    bound = derived_bound(ErrorModel(roundings=1), torch.float16, Sensitivity(), expected)
    assert bound[0] == pytest.approx(largest_rounding(torch.float16))
    assert bound[1] > bound[0]
    assert derived_bound(ErrorModel(roundings=1), torch.float16, Sensitivity(), expected[:0]).shape == (0,)


def test_what_does_not_round_has_no_room_for_subnormal_numbers_either():
    tiny = torch.full((2, 4), 1e-7, dtype=torch.float64)
    assert derived_bound(ErrorModel(roundings=0), torch.float16, Sensitivity(), tiny).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_term_of_a_derived_bound_by_itself(dtype):
    fine = rounding_unit(torch.float32) / rounding_unit(dtype)
    expected, a, s = torch.ones(2, 4, dtype=torch.float64), [0.5, 3.0], [2.0, 7.0]
    both = Sensitivity(
        amplification=torch.tensor(a, dtype=torch.float64), score_sensitivity=torch.tensor(s, dtype=torch.float64)
    )
    for model, terms in (
        (ErrorModel(roundings=0, accumulation=5), [5 * (1 + x) * fine for x in a]),
        (ErrorModel(roundings=0, products=3), [3 * x for x in a]),
        (ErrorModel(roundings=0, scores=6), [6 * x * fine for x in s]),
    ):
        assert derived_bound(model, dtype, both, expected).tolist() == pytest.approx(terms)
    alone = derived_bound(ErrorModel(roundings=0, accumulation=5, products=3, scores=6), dtype, Sensitivity(), expected)
    assert alone.tolist() == pytest.approx([5 * fine] * 2)


def test_an_amplification_that_is_no_number_gives_no_room():
    nothing = Sensitivity(amplification=torch.tensor([torch.nan, 1.0], dtype=torch.float64))
    bound = derived_bound(ErrorModel(roundings=0, products=3), torch.float32, nothing, torch.ones(2, 4))
    assert bound.tolist() == [0, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", [None, ErrorModel(roundings=2, accumulation=7)])
def test_a_control_bound_by_hand(dtype, model):
    fine = rounding_unit(torch.float32) / rounding_unit(dtype)
    floor = largest_rounding(dtype) + 10 * fine if model is None else 2 * largest_rounding(dtype) + 7 * fine
    control = torch.tensor([3.0, 0.5, torch.inf, 2.0, torch.nan, -torch.inf], dtype=torch.float64)
    bound = control_bound(control, dtype, torch.ones(6, 4), factor=3.0, model=model)
    assert bound.tolist() == pytest.approx([floor + 3 * x for x in (3.0, 2.0, 2.0, 2.0, 2.0, 2.0)])
    unknown = torch.full((2,), torch.nan, dtype=torch.float64)
    nothing = control_bound(unknown, dtype, torch.ones(2, 4), factor=3.0, model=model)
    assert nothing.tolist() == pytest.approx([floor] * 2)


def test_subnormal_values_have_a_bound_of_steps():
    """The states of a recurrence with small weights: float16 has steps of 6e-8, however small the values are."""
    step, control = 2.0**-24, torch.zeros(4, dtype=torch.float64)
    expected = torch.tensor([[1.0] * 4, [3e-6] * 4, [0.0] * 4, [torch.nan] * 4], dtype=torch.float64)
    normal, subnormal, zero, unknown = (
        control_bound(control, torch.float16, expected, factor=4.0) * rounding_unit(torch.float16)
    ).tolist()
    assert subnormal - normal == pytest.approx(4 * step / 3e-6, rel=1e-3)
    assert zero == unknown == pytest.approx(normal, rel=1e-3)
