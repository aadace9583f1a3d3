"""What is read off a router and its experts: the bias of the choice, and the weights that were used."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.judge.explain.experts.mixture import Mixture
from harness.judge.explain.experts.router import bias_of


def failure_of(router, block):
    return SimpleNamespace(
        module=router, hf=SimpleNamespace(module=lambda _path: block), operation=SimpleNamespace(module="mlp.gate.topk")
    )


@pytest.mark.parametrize("is_in_router", [True, False])
def test_the_bias_of_a_choice_is_found_in_the_router_or_around_it(is_in_router):
    router, block = nn.Linear(4, 3), nn.Module()
    bias = torch.tensor([1.0, -2.0, 3.0])
    (router if is_in_router else block).register_buffer("e_score_correction_bias", bias)
    explanation = bias_of(failure_of(router, block))
    assert explanation is not None
    assert explanation.tolist() == bias.tolist()


def test_the_bias_of_a_routers_product_is_no_bias_of_the_choice():
    assert bias_of(failure_of(nn.Linear(4, 3), nn.Module())) is None


@pytest.mark.parametrize(("num_experts", "is_known"), [(4, True), (5, False)])
def test_weights_are_known_up_to_half_as_many_experts_as_elements(num_experts, is_known):
    outputs = torch.randn(num_experts, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = torch.arange(3.0 * num_experts, dtype=torch.float64).view(3, num_experts)
    base = torch.ones(3, 8, dtype=torch.float64)
    mixture = Mixture(
        wrong=SimpleNamespace(actual=base + torch.einsum("re,erd->rd", weights, outputs)), module=nn.Module(),
        base=base, x=torch.zeros(3, 8), chosen=torch.zeros(3, 1, dtype=torch.int64), weights=torch.ones(3, 1),
        outputs=outputs,
    )  # fmt: skip
    explanation = mixture.weights_used()
    assert (explanation is not None) == is_known
    if explanation is not None:
        assert torch.allclose(explanation, weights)
