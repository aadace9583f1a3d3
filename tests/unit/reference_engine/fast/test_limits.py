"""Backends with limits: what they refuse, and which others serve it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from reference_engine import EngineConfig, LLMEngine
from reference_engine.attention.recompute import RecomputeAttention
from reference_engine.attention.select import BACKENDS, find_backend
from reference_engine.errors import ConfigError
from reference_engine.fast.attention.limits import KernelLimits
from reference_engine.fast.fast_kernels import FastKernels

from ..test_kv_cache import make_spec


class Picky(RecomputeAttention):
    limits = KernelLimits(
        dtypes=(torch.bfloat16, torch.float16), head_dims=(64, 128), block_size_multiple=256, device_types=("cuda",),
        has_windows=False,
    )  # fmt: skip


CHOICE = {**BACKENDS, "picky": Picky}


@pytest.mark.parametrize(
    ("change", "expected", "actual"),
    [
        ({"dtype": torch.float32}, "dtype bfloat16 or float16", "float32"),
        ({"head_dim": 96}, "head_dim 64 or 128", "96"),
        ({"block_size": 16}, "block_size a multiple of 256", "16"),
        ({"device": torch.device("cpu")}, "device cuda", "cpu"),
        ({"layer_windows": (None, 7)}, "no sliding window", "7"),
        ({"block_size": 16, "head_dim": 96}, "head_dim 64 or 128; block_size a multiple of 256", "96; 16"),
    ],
)
def test_a_backend_that_cannot_serve_says_which_can(change: dict[str, object], expected: str, actual: str) -> None:
    served = make_spec(dtype=torch.bfloat16, head_dim=64, block_size=512, device=torch.device("cuda"))
    assert find_backend("picky", served, CHOICE) is Picky
    with pytest.raises(ConfigError) as caught:
        find_backend("picky", replace(served, **change), CHOICE)
    assert str(caught.value) == (
        f"the attention backend picky does not serve this, in EngineConfig.attention_backend: expected {expected}, "
        f"found {actual}. Backends that do: paged, contiguous, recompute."
    )


def test_an_unknown_backend_is_told_the_names_that_fit() -> None:
    with pytest.raises(ConfigError, match="expected one of paged, contiguous, recompute, found flash"):
        find_backend("flash", make_spec(), CHOICE)
    with pytest.raises(ConfigError, match="expected one of paged, contiguous, recompute, picky, found flash"):
        find_backend(
            "flash",
            make_spec(dtype=torch.float16, head_dim=128, block_size=256, device=torch.device("cuda")),
            CHOICE,
        )


def test_the_engine_asks_before_it_loads(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastKernels, "backends", CHOICE)
    with pytest.raises(
        ConfigError, match=r"the attention backend picky does not serve this.*found float32; 12; 16; cpu"
    ):
        LLMEngine(checkpoint.folder, EngineConfig(attention_backend="picky"))


@pytest.mark.parametrize("name", ["cpp", "varlen", "recompute"])
def test_a_cache_in_float8_is_for_backends_that_read_it(name: str) -> None:
    spec = make_spec(dtype=torch.bfloat16, head_dim=64, block_size=256, stored_dtype=torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"expected .*kv_cache_dtype auto.*found .*float8_e4m3fn"):
        find_backend(name, spec, FastKernels.backends)
