"""A live engine without an adapter: the fused toy of the examples."""

import pytest
import torch


@pytest.fixture
def fused_engine(fused, checkpoints):
    """Return what builds a toy engine with enough blocks for many requests."""

    def build(name="qwen2-tiny", dtype=torch.float32):
        engine = fused.FusedEngine(checkpoints / name, dtype)
        engine.free = [block * 37 % 1024 for block in range(1024)]
        for layer in engine.model.layers:
            layer.attn.cache = torch.zeros(2, 1024, *layer.attn.shape, fused.BLOCK, dtype=dtype)
        return engine

    return build
