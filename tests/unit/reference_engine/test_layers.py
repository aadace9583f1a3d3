from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from reference_engine.layers import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 48), (5, 6, 12)])
def test_rms_norm_rounds_as_transformers_and_leaves_its_input(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    theirs = LlamaRMSNorm(shape[-1], eps=1e-5)
    torch.nn.init.uniform_(theirs.weight, 0.5, 1.5)
    theirs.to(dtype)
    x = torch.randn(shape).to(dtype)
    before = x.clone()
    actual = RMSNorm(theirs.weight.detach(), 1e-5)(x)
    assert torch.equal(actual, theirs(x))
    assert torch.equal(x, before)
