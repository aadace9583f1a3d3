"""Norms of other families: one plus the weight, layer norms with a bias."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from harness.judge.explain.core.wrong_operation import WrongOperation
from harness.judge.explain.norms import (
    changed_weights,
    form_of,
    norm_skipped,
    over_other_elements,
    weight_otherwise,
    wrong_eps,
)

WIDTH, EPS = 24, 1e-5


class OnePlus(nn.Module):
    """As Gemma's."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), EPS

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_norm():
    norm = nn.LayerNorm(WIDTH, eps=EPS).double()
    norm.weight.data, norm.bias.data = random(WIDTH, seed=1), random(WIDTH, seed=2)
    return norm


class _Failure(SimpleNamespace):
    """The parts of a failure that a form is looked for with; some tests put other inputs into it."""

    is_expected, _are_expected = WrongOperation.is_expected, WrongOperation._are_expected


def failure(module, actual=None):
    x = random(7, WIDTH)
    expected = module(x).detach()
    return _Failure(
        module=module, inputs=[x], expected=expected, actual=expected if actual is None else actual,
        hf=SimpleNamespace(head_dim=WIDTH),
    )  # fmt: skip


def outputs(explain, failure):
    return {hypothesis.cause: hypothesis.output for hypothesis in explain(failure)}


def test_the_form_is_found():
    one_plus, layered = form_of(failure(OnePlus(random(WIDTH, seed=1)))), form_of(failure(layer_norm()))
    assert (one_plus.is_offset, one_plus.is_centred, one_plus.bias) == (True, False, None)
    assert (layered.is_offset, layered.is_centred) == (False, True)
    assert torch.equal(layered.of_weight(layered.weight), layered.weight)


def test_a_layer_norm_of_one_plus_the_weight():
    """Nemotron's."""
    module = NemotronLayerNorm1P(WIDTH, eps=EPS).double()
    module.weight.data, module.bias.data = random(WIDTH, seed=1), random(WIDTH, seed=2)
    form = form_of(failure(module))
    assert (form.is_offset, form.is_centred, form.eps) == (True, True, EPS)
    cause = "the norm's weight is applied as it is, without adding 1"
    plain = module(random(7, WIDTH)) - nn.functional.layer_norm(random(7, WIDTH), (WIDTH,), eps=EPS)
    torch.testing.assert_close(outputs(weight_otherwise, failure(module))[cause], plain.detach())


def test_a_module_that_does_not_say_its_eps():
    """OLMo's, which has no weight either."""
    given = failure(OlmoLayerNorm(WIDTH))
    given.hf = SimpleNamespace(head_dim=8)
    assert (form_of(given).eps, form_of(given).is_centred) == (1e-5, True)
    other = nn.functional.layer_norm(random(7, WIDTH), (WIDTH,), eps=1e-3)
    torch.testing.assert_close(outputs(wrong_eps, given)["wrong eps: 0.001 instead of 1e-05"], other)


def test_a_module_that_does_something_else_has_none():
    class Other(nn.Module):
        weight = torch.ones(WIDTH)

        def forward(self, x):
            return x.tanh()

    assert form_of(failure(Other())) is None
    assert outputs(wrong_eps, failure(Other())) == {}


@pytest.mark.parametrize("make", [lambda: OnePlus(random(WIDTH, seed=1)), layer_norm])
def test_explanations_hold_for_it(make):
    module, right = make(), failure(make())
    module.eps = 1e-3
    wrong = module(right.inputs[0]).detach()
    found = outputs(wrong_eps, failure(make(), wrong))
    assert torch.allclose(found["wrong eps: 0.001 instead of 1e-05"], wrong)
    module = make()
    module.weight.data[5] *= 3
    wrong = module(right.inputs[0]).detach()
    found = outputs(changed_weights, failure(make(), wrong))
    assert torch.allclose(found["one weight of the norm is another: [5]"], wrong)
    assert torch.equal(outputs(norm_skipped, right)["the norm is skipped"], right.inputs[0])


def test_what_only_one_form_gets_wrong():
    one_plus, layered = failure(OnePlus(random(WIDTH, seed=1))), failure(layer_norm())
    x, normed = one_plus.inputs[0], one_plus.expected / (1 + random(WIDTH, seed=1))
    plain = outputs(weight_otherwise, one_plus)["the norm's weight is applied as it is, without adding 1"]
    assert torch.allclose(plain, normed * random(WIDTH, seed=1))
    uncentred = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * random(WIDTH, seed=1) + random(WIDTH, seed=2)
    assert torch.allclose(outputs(over_other_elements, layered)["the mean is not subtracted"], uncentred)


def test_a_norm_without_a_weight_over_heads():
    class Plain(nn.Module):
        eps = EPS

        def forward(self, x):
            heads = x.unflatten(-1, (-1, 8))
            return (heads * (heads.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(1)

    found = failure(Plain())
    found.hf = SimpleNamespace(head_dim=8)
    assert form_of(found).x.shape == (7, 3, 8)


def test_a_norm_without_a_weight_is_as_wide_as_its_input_or_as_a_head():
    class Plain(nn.Module):
        eps = EPS

        def __init__(self, width):
            super().__init__()
            self.width = width

        def forward(self, x):
            heads = x.unflatten(-1, (-1, self.width))
            return (heads * (heads.square().mean(-1, keepdim=True) + EPS).rsqrt()).flatten(1)

    for width, head_dim in ((WIDTH, 4), (6, 6)):
        given = failure(Plain(width))
        given.hf = SimpleNamespace(head_dim=head_dim)
        assert form_of(given).weight.tolist() == [1.0] * width
    given = failure(Plain(8))
    given.hf = SimpleNamespace(head_dim=6)
    assert form_of(given) is None


def test_a_weight_that_is_no_row_of_factors_has_no_form():
    given = failure(layer_norm())
    for weight in (random(2, WIDTH), random(5), random(WIDTH, WIDTH)):
        given.module = SimpleNamespace(weight=weight, eps=EPS)
        assert form_of(given) is None


def test_a_form_holds_for_every_row_rows_of_zeros_too():
    given = failure(OnePlus(random(WIDTH, seed=1)))
    given.inputs[0][2] = 0
    given.expected = given.module(given.inputs[0]).detach()
    assert form_of(given) is not None
    given.expected[3] *= 1 + 1.1e-5
    assert form_of(given) is None
    given.expected[3] /= 1 + 0.3e-5
    assert form_of(given) is not None


@pytest.mark.parametrize("module", [OnePlus(random(WIDTH, seed=1)), layer_norm()])
def test_what_an_explanation_yields_has_the_bias(module):
    given = failure(module)
    form = form_of(given)
    weight = form.of_weight(random(WIDTH, seed=5))
    plain = form.x[:, 0] * (form.x[:, 0].square().mean(-1, keepdim=True) + EPS).rsqrt()
    assert torch.allclose(weight, random(WIDTH, seed=5) + form.is_offset)
    hypothesis = next(weight_otherwise(given))
    assert hypothesis.output.shape == given.expected.shape
    assert torch.allclose(hypothesis.output, plain if form.bias is None else plain + form.bias)


@pytest.mark.parametrize("begin", [0, 5])
def test_a_norm_may_read_a_part_of_what_was_recorded(begin):
    """One head of several, or the steps of a scan beside its B and C."""
    given, wide = failure(layer_norm()), random(7, WIDTH + 9, seed=3)
    given.inputs[0] = torch.cat((wide[:, :begin], given.inputs[0], wide[:, begin + WIDTH :]), dim=1)
    read = given.inputs[0][:, begin : begin + WIDTH]
    assert torch.equal(form_of(given).raw[:, 0], read)
    assert torch.equal(outputs(norm_skipped, given)["the norm is skipped"], read)
