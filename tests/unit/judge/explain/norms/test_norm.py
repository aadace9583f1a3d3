import pytest
import torch

TAP, SOURCE = "model.layers.1.input_layernorm", "model.layers.0.output"
QK_TAP, QK_SOURCE = "model.layers.1.self_attn.k_norm", "model.layers.1.self_attn.k_proj"


def normed(x, weight, eps=1e-6, statistic=None):
    mean = x.square().mean(-1, keepdim=True) if statistic is None else statistic
    return x * (mean + eps).rsqrt() * weight


def test_weight(bench):
    bench = bench()
    x, weight = bench.tap(SOURCE), bench.weight(TAP)
    wrong = {
        "the norm's weight is not applied": normed(x, 1.0),
        "the norm's weight is applied as 1 + weight": normed(x, weight + 1),
        "the norm's weight is applied twice": normed(x, weight * weight),
        "the norm only applies its weight": x * weight,
        "the norm is skipped": x,
        "the weight is that of model.layers.0.input_layernorm": normed(
            x, bench.weight("model.layers.0.input_layernorm")
        ),
        "a layer norm: the mean is subtracted": normed(x - x.mean(-1, keepdim=True), weight),
    }
    for cause, tensor in wrong.items():
        found = bench.explain(TAP, tensor)
        assert (found.cause, found.scope) == (cause, "every row")
        assert found.residual_after < 5


@pytest.mark.parametrize("eps", [1e-5, 3e-4])
def test_eps(bench, eps):
    bench = bench()
    tap, source = "model.layers.0.input_layernorm", "model.embed_tokens"  # rows of small norm tell it best
    found = bench.explain(tap, normed(bench.tap(source), bench.weight(tap), eps))
    assert found.cause == f"wrong eps: {eps:g} instead of 1e-06"


def test_eps_outside_of_the_root(bench):
    bench = bench()
    tap, x = "model.layers.0.input_layernorm", bench.tap("model.embed_tokens")
    for eps in (1e-3, 4.2e-3):
        root = x.square().mean(-1, keepdim=True).sqrt() + eps
        assert bench.explain(tap, x / root * bench.weight(tap)).cause == f"eps {eps:g} is added outside of the root"


def test_variance_in_bfloat16(bench):
    bench = bench()
    x = bench.tap(SOURCE)
    statistic = x.bfloat16().square().mean(-1, keepdim=True).double()
    found = bench.explain(TAP, normed(x, bench.weight(TAP), statistic=statistic))
    assert found.cause == "the norm's variance is computed in bfloat16"


def test_a_statistic_of_another_kind(bench):
    bench = bench()
    x = bench.tap(SOURCE)
    found = bench.explain(TAP, normed(x, bench.weight(TAP), statistic=x.abs().amax(-1, keepdim=True)))
    assert found.cause == "the norm's statistic is wrong"
    coarse = x.square().mean(-1, keepdim=True) * (1 + 1e-3 * torch.rand(len(x), 1, dtype=torch.float64))
    found = bench.explain(TAP, normed(x, bench.weight(TAP), statistic=coarse))
    assert found.cause == "the norm's variance is computed in a lower precision"


def test_over_all_heads(bench):
    bench = bench()
    x, weight = bench.tap(QK_SOURCE), bench.weight(QK_TAP)
    num_heads = x.shape[1] // len(weight)
    found = bench.explain(QK_TAP, normed(x, weight.repeat(num_heads)))
    assert found.cause == "the norm runs over all heads instead of each head"


def test_qk_norm_skipped_in_decode(bench):
    bench = bench()
    rows, wrong = bench.rows(), bench.tap(QK_TAP)
    lengths = torch.tensor([request.prompt_length for request in bench.golden.requests])[rows.request]
    decode = rows.position >= lengths
    wrong[decode] = bench.tap(QK_SOURCE)[decode]
    found = bench.explain(QK_TAP, wrong)
    assert (found.cause, found.scope) == ("the norm is skipped", "decode rows")


def test_a_sum_of_squares_that_overflows(bench):
    bench = bench()
    x = bench.tap(SOURCE)
    x[5] *= 400 / x[5].norm()  # a sum of 160,000, of terms that float16 holds
    zeros = bench.tap(TAP)
    zeros[5] = 0
    assert x[5].square().max() < 60_000
    found = bench.explain(TAP, zeros, **{SOURCE: x})
    assert found.cause == "the sum of the squares overflows float16"


def test_squares_that_overflow(bench, monkeypatch):
    """HF's own norm overflows there, too, so that its control would excuse the engine's."""
    monkeypatch.setattr("harness.judge.compare.row_judge.CONTROL_FACTOR", 0.0)
    bench = bench()
    x = bench.tap(SOURCE)
    x[5] *= 1e25
    zeros = bench.tap(TAP)
    zeros[5] = 0
    found = bench.explain(TAP, zeros, **{SOURCE: x})
    assert found.cause == "the squares overflow float32"


@pytest.mark.parametrize(
    ("divisor", "cause"),
    [
        (1, "not divided"),
        (95, "divided by 95 instead of 96"),
        (128, "divided by 128 instead of 96"),
        (77, "divided by 77 instead of 96, or a constant gain of 0.895591"),  # no number that a norm would know
    ],
)
def test_the_divisor_of_the_mean(bench, divisor, cause):
    bench = bench()
    x = bench.tap(SOURCE)
    statistic = x.square().sum(-1, keepdim=True) / divisor
    found = bench.explain(TAP, normed(x, bench.weight(TAP), statistic=statistic))
    assert found.cause == f"the sum of the squares is {cause}"
    assert found.num_fitted == (divisor == 77)


def test_eps_of_the_sum(bench):
    bench = bench("llama-tiny")
    tap, x = "model.layers.0.input_layernorm", bench.tap("model.embed_tokens")
    found = bench.explain(tap, normed(x, bench.weight(tap), 1e-5 / x.shape[-1]))
    assert found.cause == "eps 1e-05 is added to the sum of the squares instead of to their mean"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_weights(bench, dtype):
    bench = bench(dtype=dtype)
    x, weight = bench.tap(SOURCE), bench.weight(TAP)
    weight[17] *= 1.5
    assert bench.explain(TAP, normed(x, weight)).cause == "one weight of the norm is another: [17]"
    weight[[3, 40]] *= -2
    assert bench.explain(TAP, normed(x, weight)).cause == "3 weights of the norm are others"
    shifted = bench.explain(TAP, normed(x, bench.weight(TAP).roll(2)))
    assert shifted.cause == "the weights of the norm are in another order: shifted by 2"
    random = torch.rand(len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = bench.explain(TAP, normed(x, random))
    assert found.cause == "the norm's weights are none of this checkpoint's: not loaded, or changed"
    assert found.num_fitted == len(weight)


def test_a_scale_of_each_row_is_seen_and_is_no_cause(bench):
    bench = bench()
    x = bench.tap(SOURCE)
    found = bench.explain(TAP, normed(x, bench.weight(TAP), statistic=x.abs().amax(-1, keepdim=True)))
    assert not found.is_cause
    # An eps that grows is no rounding, though it is as small as one.
    mean = x.square().mean(-1, keepdim=True)
    found = bench.explain(TAP, normed(x, bench.weight(TAP), statistic=mean * (1 + 1e-3 * mean / mean.max())))
    assert not found.is_cause


def test_an_eps_that_fits_no_row_well_is_no_cause(bench):
    """Statistics that are wrong by another factor in each row, all of them too large: an eps explains most of it."""
    bench = bench(dtype=torch.bfloat16)
    x = bench.tap(SOURCE)
    mean = x.square().mean(-1, keepdim=True)
    factors = 1.04 + 0.02 * torch.rand(len(x), 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = bench.explain(TAP, normed(x, bench.weight(TAP), statistic=mean * factors))
    assert not found.is_cause
    assert found.cause == "the norm's statistic is wrong"
