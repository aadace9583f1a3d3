"""What is read off the rows of experts: the weights that were used."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.judge.explain.experts.mixture import Mixture


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
