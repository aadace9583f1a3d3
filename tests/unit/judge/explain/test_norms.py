"""Mistakes of a norm, made by plain code of an engine: the trial names each, whatever the form of the model's norm."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from harness.formats.taps import Kind, Operation
from harness.judge.explain import norms
from harness.judge.explain.causes import EXPLANATIONS
from harness.judge.explain.trial.ranking import rank_hypotheses

from .toys import ToyModel, by_cause, failure_of, random

TAP, SIBLING = "model.layers.1.norm", "model.layers.0.norm"
ROWS, WIDTH, EPS = 16, 24, 1e-3
X = 0.4 * random(ROWS, WIDTH)


class Norm(nn.Module):
    """An engine's norm, with everything that may be wrong in it as a part that can be replaced."""

    def __init__(self, *, size=WIDTH, offset=0.0, is_centred=False, bias=None, eps=EPS):
        super().__init__()
        self.weight = nn.Parameter(random(size, seed=1) * 0.3 + 1 - offset, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.eps, self.offset, self.is_centred = eps, offset, is_centred
        self.mean = lambda squares: squares.mean(-1, keepdim=True)
        self.scale = None
        self.low = lambda x: x

    def forward(self, x):
        heads = x.unflatten(-1, (-1, len(self.weight)))
        heads = heads - heads.mean(-1, keepdim=True) if self.is_centred else heads
        mean = self.mean(self.low(heads) ** 2)
        scale = 1 / (mean + self.eps).sqrt() if self.scale is None else self.scale(mean)
        normed = self.low(self.low(heads) * scale) * (self.weight + self.offset)
        return (normed if self.bias is None else normed + self.bias).flatten(-2)


FORMS = {
    "rms": {}, "heads": {"size": WIDTH // 3}, "offset": {"offset": 1.0},
    "layer": {"is_centred": True, "bias": random(WIDTH, seed=2)},
}  # fmt: skip


def wrong_rows(right, wrong, x=X, dtype=torch.float32, bound=5.0, head_dim=WIDTH // 3):
    """Rows of a wrong norm, as an engine rounds them."""
    modules = {TAP: right, SIBLING: Norm(size=len(getattr(right, "weight", x[0])))}
    modules[SIBLING].weight.data = random(*modules[SIBLING].weight.shape, seed=8)
    operations = [Operation(tap=tap, kind=Kind.NORM, inputs=("x",), source=tap) for tap in modules]
    model = ToyModel(*operations, modules=modules, head_dim=head_dim)
    actual = wrong if isinstance(wrong, torch.Tensor) else wrong(x)
    with torch.no_grad():
        expected = right(x).flatten(1)
        return failure_of(operations[0], actual.to(dtype).double(), expected, x, model=model, dtype=dtype, bound=bound)


def named(*arguments, **options):
    with torch.no_grad():
        return rank_hypotheses(wrong_rows(*arguments, **options), "every row")


def of(**changes):
    """Return what makes of a norm one with other parts."""

    def change(module):
        wrong = copy.deepcopy(module)
        for name, value in changes.items():
            if name == "weight":
                wrong.weight.data = value(wrong.weight.data.clone())
            else:
                setattr(wrong, name, value(wrong) if name in ("mean", "scale", "is_centred") else value)
        return wrong

    return change


def put(at, value):
    def change(weight):
        weight[at] = value
        return weight

    return change


def by(divisor):
    return of(mean=lambda wrong: lambda squares: squares.sum(-1, keepdim=True) / divisor)


def coarse(dtype):
    return lambda x: x.to(dtype).double()


def statistic(change):
    """Return a norm whose mean of the squares goes through `change`."""
    return of(mean=lambda wrong: lambda squares: change(squares.mean(-1, keepdim=True)))


def rooted_in_turns(mean):
    """Return the scale in bfloat16, of every second row by a root that is rounded as well."""
    low = coarse(torch.bfloat16)
    root = (low(low(mean) + EPS)).sqrt()
    is_odd = torch.arange(len(mean)).view(-1, *[1] * (mean.dim() - 1)) % 2 == 1
    return low(1 / torch.where(is_odd, low(root), root))


WEIGHTS = {
    "one weight of the norm is another: [5]": of(weight=put(5, 2.5)),
    "3 weights of the norm are others": of(weight=put([0, 3, 6], -2.0)),
    "the weights of the norm are in another order: shifted by 2": of(weight=lambda w: w.roll(2)),
    "the weights of the norm are in another order: shifted by -2": of(weight=lambda w: w.roll(-2)),
    "the weights of the norm are in another order": of(weight=lambda w: w.flip(0)),
    "the norm's weights are none of this checkpoint's: not loaded, or changed": of(
        weight=lambda w: random(len(w), seed=5)
    ),
}
MISTAKES = WEIGHTS | {
    "wrong eps: 1e-05 instead of 0.001": of(eps=1e-5),
    "wrong eps: 0.42 instead of 0.001": of(eps=0.42),
    "eps 0.001 is added to the sum of the squares instead of to their mean": lambda right: of(
        eps=EPS / len(right.weight)
    )(right),
    "eps 0.001 is added outside of the root": of(scale=lambda wrong: lambda mean: 1 / (mean.sqrt() + wrong.eps)),
    "eps 0.01 is added outside of the root": of(scale=lambda wrong: lambda mean: 1 / (mean.sqrt() + 0.01)),
    "eps 0.25 is added outside of the root": of(scale=lambda wrong: lambda mean: 1 / (mean.sqrt() + 0.25)),
    "the sum of the squares is not divided": by(1.0),
    "the sum of the squares is divided by 23 instead of 24": by(23.0),
    "the sum of the squares is divided by 128 instead of 24": by(128.0),
    "the sum of the squares is divided by 77 instead of 24": by(77.0),
    "the mean is not subtracted|a layer norm: the mean is subtracted": of(
        is_centred=lambda wrong: not wrong.is_centred
    ),
    "the norm's variance is computed in bfloat16": statistic(coarse(torch.bfloat16)),
    "the norm's variance is computed in float16": statistic(coarse(torch.float16)),
    "variance is computed in bfloat16": of(scale=lambda wrong: rooted_in_turns),
    "the norm is computed in bfloat16": of(low=coarse(torch.bfloat16)),
    "the norm is computed in float16": of(low=coarse(torch.float16)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cause", MISTAKES)
def test_a_mistake_is_named(form, cause):
    right, mistake = Norm(**FORMS[form]), MISTAKES[cause]
    if form == "heads" and " instead of 24" in cause:
        mistake = by(7.0) if " 23 " in cause else mistake
        cause = cause.replace("instead of 24", "instead of 8").replace(" 23 ", " 7 ")
    explanation = named(right, mistake(right))
    assert any(name in explanation.cause for name in cause.split("|")), explanation
    assert explanation.is_cause
    assert explanation.residual_after < 5


@pytest.mark.parametrize("cause", WEIGHTS)
def test_weights_are_named_in_16_bits_too(cause):
    right = Norm()
    explanation = named(right, WEIGHTS[cause](right), dtype=torch.bfloat16)
    assert (explanation.cause, explanation.is_cause) == (cause, True)


@pytest.mark.parametrize("form", FORMS)
def test_what_an_explanation_yields_is_named_if_it_is_planted(form):
    right = Norm(**FORMS[form])
    sound = wrong_rows(right, right)
    planted = [
        hypothesis
        for explain in EXPLANATIONS[Kind.NORM]
        for hypothesis in explain(sound)
        if not hypothesis.num_fitted and not hypothesis.is_vague
    ]
    assert len({hypothesis.cause for hypothesis in planted}) > 15
    for hypothesis in planted:
        explanation = named(right, hypothesis.output, bound=1.0)
        is_seen = (hypothesis.output - sound.expected).norm() > 1e-4 * sound.expected.norm()
        is_named = hypothesis.cause in explanation.cause or "others" in explanation.cause
        assert not is_seen or is_named, (hypothesis.cause, explanation)


def test_the_elements_that_are_normalised():
    right = Norm(size=WIDTH // 3)
    whole = of(mean=lambda wrong: lambda squares: squares.mean((-2, -1), keepdim=True))(right)
    assert named(right, whole).cause == "the norm runs over all heads instead of each head"
    wide = Norm()
    heads = X.unflatten(1, (3, -1))
    apart = (heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt()).flatten(1) * wide.weight
    assert named(wide, apart).cause == "the norm runs over each head instead of all heads together"


@pytest.mark.parametrize(
    ("size", "cause"),
    [
        (80, "the sum of the squares overflows float16"),
        (400, "the squares overflow float16"),
        (1e25, "the squares overflow float32"),
    ],
)
def test_an_overflow_gives_zeros(size, cause):
    right, x = Norm(), X.clone()
    x[:3] = size * x[:3].sign()
    wrong = right(x)
    wrong[:3] = 0
    rows = wrong_rows(right, wrong, x).take(torch.tensor([0, 1, 2]))
    assert rank_hypotheses(rows, "every row").cause == cause
    assert by_cause(norms.statistic_overflows, wrong_rows(right, right)) == {}


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("cause", "scale_of", "change"),
    [
        ("`torch.rsqrt(variance + self.variance_epsilon)` is rounded to bfloat16", lambda scale: scale.to(HALF), None),
        ("`hidden_states.to(torch.float32)` is rounded to bfloat16", lambda scale: scale, lambda x: x.to(HALF)),
    ],
)
def test_a_part_of_a_norm_in_a_lower_precision(bench, cause, scale_of, change):
    """HF's code says which part it is."""
    norm, x = "model.layers.1.input_layernorm", bench.tap("model.layers.0.output")
    x = x if change is None else change(x).double()
    scale = (x.square().mean(-1, keepdim=True) + bench.config.rms_norm_eps).rsqrt()
    explanation = bench.explain(norm, x * scale_of(scale).double() * bench.weight(norm))
    assert cause in explanation.cause
    assert explanation.is_cause


# What is fitted, at both sides of its limits.


@pytest.mark.parametrize(
    ("explain", "mistake", "is_fitted"),
    [
        (norms.wrong_eps, of(eps=9.9), True),
        (norms.wrong_eps, of(eps=10.2), False),
        (norms.wrong_eps, of(eps=-0.005), False),
        (norms.wrong_divisor, by(77.0), True),
        (norms.wrong_divisor, by(23.8), False),  # rounds to all of them
        (norms.wrong_divisor, by(0.9), False),
        (norms.wrong_divisor, by(999_000.0), True),
        (norms.wrong_divisor, by(1_001_000.0), False),
    ],
)
def test_numbers_that_are_fitted(explain, mistake, is_fitted):
    right = Norm()
    hypotheses = by_cause(explain, wrong_rows(right, mistake(right))).items()
    usual = ("outside", *(f" {eps:g} " for eps in norms._EPSILONS))
    fitted = [item for cause, item in hypotheses if item.num_fitted and not any(word in cause for word in usual)]
    assert bool(fitted) == is_fitted
    assert all(item.output.isfinite().all() for item in fitted)


def nearly(order, share):
    """Return an order of the weights in which the largest is off by a share of itself."""

    def change(weight):
        ordered = order(weight)
        return ordered + share * weight.max() * (ordered == weight.max())

    return change


@pytest.mark.parametrize(
    ("change", "cause", "num_fitted"),
    [
        (put([1, 2, 4], torch.tensor([3.0, -1.0, 2.0]).double()), "3 weights of the norm are others", 6),
        (put(slice(0, 13), -3.0), "the norm's weights are none of this checkpoint's", WIDTH),
        (nearly(lambda w: w.roll(1), 0.018), "in another order: shifted by 1", WIDTH),
        (nearly(lambda w: w.roll(1), 0.022), "none of this checkpoint's", WIDTH),
        (nearly(lambda w: w.flip(0), 0.018), "are in another order", WIDTH),
        (nearly(lambda w: w.flip(0), 0.022), "none of this checkpoint's", WIDTH),
        (lambda w: w + 0.009 * w.max() * random(WIDTH, seed=6).sign(), "none of this checkpoint's", WIDTH),
        (lambda w: w + 0.0005 * w.max() * random(WIDTH, seed=6).sign(), "not quite those of this checkpoint", WIDTH),
    ],
)
def test_weights_that_are_fitted(change, cause, num_fitted):
    right = Norm()
    (hypothesis,) = by_cause(norms.changed_weights, wrong_rows(right, of(weight=change)(right))).values()
    assert cause in hypothesis.cause
    assert hypothesis.num_fitted == num_fitted
    if num_fitted < WIDTH:
        shown = ", ".join(f"[{at}] is {value} instead of {float(right.weight[at]):.4g}"
                          for at, value in ((1, 3), (2, -1), (4, 2)))  # fmt: skip
        assert hypothesis.detail == shown


@pytest.mark.parametrize(("share", "num_changed"), [(0.09, 1), (0.12, 2)])
def test_a_weight_counts_as_changed_beside_the_one_that_changed_most(share, num_changed):
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64) * random(ROWS, 1).sign()
    right = Norm()
    wrong = of(weight=lambda w: w + share * (torch.arange(WIDTH) == 5) + (torch.arange(WIDTH) == 2))(right)
    (hypothesis,) = by_cause(norms.changed_weights, wrong_rows(right, wrong, x)).values()
    assert hypothesis.num_fitted == 2 * num_changed


# The form of the model's norm.


def test_forms_of_hf_modules():
    """Nemotron has one plus the weight and a bias; OLMo's module says no eps, and has no weight."""
    nemotron = NemotronLayerNorm1P(WIDTH, eps=EPS).double()
    nemotron.weight.data, nemotron.bias.data = random(WIDTH, seed=1), random(WIDTH, seed=2)
    form = norms.form_of(wrong_rows(nemotron, nemotron))
    assert (form.is_centred, form.eps) == (True, EPS)
    torch.testing.assert_close(form.weight, nemotron.weight.data + 1)
    olmo = OlmoLayerNorm(WIDTH)
    form = norms.form_of(wrong_rows(olmo, olmo))
    assert (form.eps, form.is_centred) == (1e-5, True)
    assert named(olmo, layer_norm(X, (WIDTH,), eps=1e-3)).cause == "wrong eps: 0.001 instead of 1e-05"


class Plain(nn.Module):
    """A norm without a weight."""

    eps = EPS

    def __init__(self, width):
        super().__init__()
        self.width = width

    def forward(self, x):
        heads = x.unflatten(-1, (-1, self.width))
        return (heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt()).flatten(1)


@pytest.mark.parametrize(("width", "head_dim", "is_known"), [(WIDTH, 4, True), (6, 6, True), (8, 6, False)])
def test_a_norm_without_a_weight_is_as_wide_as_its_input_or_as_a_head(width, head_dim, is_known):
    form = norms.form_of(wrong_rows(Plain(width), Plain(width), head_dim=head_dim))
    assert (form is not None) == is_known
    assert form is None or form.x.shape == (ROWS, WIDTH // width, width)


class Tanh(nn.Module):
    weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        return x.tanh() * math.pi


def test_what_is_no_norm_of_a_known_form_is_given_no_cause_of_one():
    assert norms.form_of(wrong_rows(Tanh(), Tanh())) is None
    assert by_cause(norms.wrong_eps, wrong_rows(Tanh(), Tanh())) == {}
    assert "eps" not in named(Tanh(), 1.5 * Tanh()(X)).cause
    for shape in ((2, WIDTH), (5,), (WIDTH, WIDTH)):  # no row of factors
        right = Norm()
        rows = wrong_rows(right, right)
        right.weight.data = random(*shape)
        assert norms.form_of(rows) is None


@pytest.mark.parametrize(("factor", "is_known"), [(1 + 1.1e-5, False), (1 + 0.8e-5, True)])
def test_a_form_holds_for_every_row_and_for_rows_of_zeros(factor, is_known):
    right, x = Norm(), X.clone()
    x[2] = 0
    rows = wrong_rows(right, right, x)
    rows.expected[3] *= factor
    assert (norms.form_of(rows) is not None) == is_known


@pytest.mark.parametrize("begin", [0, 5])
def test_a_norm_may_read_a_part_of_what_was_recorded(begin):
    """One head of several, or the steps of a scan beside its B and C."""
    right = Norm(**FORMS["layer"])
    rows, beside = wrong_rows(right, right), random(ROWS, 9, seed=3)
    rows.inputs[0] = torch.cat((beside[:, :begin], X, beside[:, begin:]), dim=1)
    assert torch.equal(norms.form_of(rows).raw[:, 0], X)


# In a recording of the reference engine.

RECORDED_TAP, SOURCE = "model.layers.1.self_attn.k_norm", "model.layers.1.self_attn.k_proj"


def test_a_norm_that_is_skipped_in_decode(bench):
    rows, wrong = bench.rows(), bench.tap(RECORDED_TAP)
    lengths = torch.tensor([request.prompt_length for request in bench.golden.requests])[rows.request]
    decode = rows.position >= lengths
    wrong[decode] = bench.tap(SOURCE)[decode]
    explanation = bench.explain(RECORDED_TAP, wrong)
    assert (explanation.cause, explanation.scope) == ("the norm is skipped", "decode rows")


def test_squares_that_overflow_in_a_recording(bench, monkeypatch):
    """HF's own norm overflows there, too, so that its control would excuse the engine's."""
    monkeypatch.setattr("harness.judge.compare.row_judge.CONTROL_FACTOR", 0.0)
    tap, source = "model.layers.1.input_layernorm", "model.layers.0.output"
    x, zeros = bench.tap(source), bench.tap(tap)
    x[5] *= 1e25
    zeros[5] = 0
    assert bench.explain(tap, zeros, **{source: x}).cause == "the squares overflow float32"
