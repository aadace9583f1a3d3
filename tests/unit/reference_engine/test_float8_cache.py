"""A cache in float8: what is stored and read, with whose scales, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference_engine import EngineConfig, EngineError, LLMEngine, SamplingParams
from reference_engine.checkpoint.load import read_cache_scales
from reference_engine.kv_cache import KVCache

from .test_kv_cache import make_spec

SCALES = ((0.5, 2.0), (0.25, 1.0))
PROMPTS = [list(range(4, 21)), [5, 6, 7], list(range(4, 12))]


@pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_stored_comes_back_rounded_times_its_scale(kept: torch.dtype, dtype: torch.dtype) -> None:
    cache = KVCache(make_spec(dtype=dtype, stored_dtype=kept, scales=SCALES), num_blocks=6, block_size=4)
    assert cache.data.dtype == kept
    k, v = torch.randn(8, 3, 4).to(dtype), 1e6 * torch.randn(8, 3, 4).to(dtype)
    slots = torch.arange(8, 16)
    cache.store(1, k, v, slots)
    top = torch.finfo(kept).max
    expected = [
        ((x.float() / scale).clamp(-top, top).to(kept).float() * scale).to(dtype) for x, scale in ((k, 0.25), (v, 1.0))
    ]
    assert expected[1].abs().max() == top
    blocks = torch.tensor([2, 3])
    for read in (cache.gather(1, slots), [x.flatten(0, 1) for x in cache.gather_blocks(1, blocks)]):
        assert all(torch.equal(a, b) for a, b in zip(read, expected, strict=True))
    assert all(torch.equal(a, b[:3]) for a, b in zip(cache.first(1, 2, 3), expected, strict=True))
    cache.copy_block(2, 5)
    assert torch.equal(cache.gather(1, torch.arange(20, 24))[0], expected[0][:4])
    cache.poison_block(5)
    assert all(x.isnan().all() for x in cache.gather(1, torch.arange(20, 24)))
    assert not cache.gather(0, torch.arange(4))[0].any(), "the null block"


def test_it_holds_as_many_more_blocks_as_its_numbers_are_smaller() -> None:
    sizes = {"max_num_seqs": 10**6, "max_model_len": 10**6}
    whole, small = (make_spec(**sizes, stored_dtype=kept) for kept in (None, torch.float8_e4m3fn))
    assert small.default_num_blocks(4) == pytest.approx(4 * whole.default_num_blocks(4), rel=1e-3)


def tokens(folder: Path, **options: Any) -> list[tuple[int, ...]]:
    config = EngineConfig(dtype="float32", max_model_len=32, block_size=4, kv_cache_dtype="float8_e4m3fn", **options)
    with LLMEngine(folder, config) as engine:
        return [item.token_ids for item in engine.generate(PROMPTS, SamplingParams(max_new_tokens=5, ignore_eos=True))]


def test_backends_and_schedules_read_the_same(checkpoint: Any) -> None:
    num_layers = LLMEngine(checkpoint.folder).model_config.num_hidden_layers
    options = {"kv_cache_scales": ((0.02, 0.05),) * num_layers}
    expected = tokens(checkpoint.folder, **options)
    assert tokens(checkpoint.folder, attention_backend="contiguous", **options) == expected
    assert tokens(checkpoint.folder, max_num_seqs=1, **options) == expected
    assert tokens(checkpoint.folder, max_num_batched_tokens=5, **options) == expected
    assert tokens(checkpoint.folder, num_blocks=9, debug_checks=True, **options) == expected, "some are preempted"
    assert tokens(checkpoint.folder, enable_prefix_caching=True, debug_checks=True, **options) == expected


def with_scales(folder: Path, target: Path, **scales: torch.Tensor) -> Path:
    """Copy a checkpoint with scales of its cache."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    save_file(
        tensors | {name.replace("__", "."): scale for name, scale in scales.items()}, target / "model.safetensors"
    )
    return target


def test_scales_of_the_checkpoint_are_read(checkpoint: Any, tmp_path: Path) -> None:
    layers = range(LLMEngine(checkpoint.folder).model_config.num_hidden_layers)
    names = [(f"model.layers.{layer}.self_attn.k_scale", f"model.layers.{layer}.self_attn.v_scale") for layer in layers]
    pairs = [(0.5 + layer, 0.25) for layer in layers]
    scales = {name: torch.tensor(scale) for at in layers for name, scale in zip(names[at], pairs[at], strict=True)}
    folder = with_scales(checkpoint.folder, tmp_path / "scaled", **scales)
    assert read_cache_scales(folder, layers) == tuple(pairs)
    with LLMEngine(folder, EngineConfig(kv_cache_dtype="float8_e5m2")) as engine:
        assert engine.runner.backend.cache.scales == tuple(pairs)
    with LLMEngine(folder) as engine:  # a cache as wide as the weights needs none
        assert engine.runner.backend.cache.data.dtype == engine.runner.dtype
    assert read_cache_scales(checkpoint.folder, layers) == ()


@pytest.mark.parametrize("wrong", [torch.tensor(0.0), torch.tensor([0.1, 0.2]), torch.tensor(torch.nan), None])
def test_scales_that_nothing_can_be_divided_by(checkpoint: Any, tmp_path: Path, wrong: torch.Tensor | None) -> None:
    name = "model.layers.0.self_attn."
    scales = {f"{name}k_scale": torch.tensor(1.0)} | ({} if wrong is None else {f"{name}v_scale": wrong})
    folder = with_scales(checkpoint.folder, tmp_path / "scaled", **scales)
    with pytest.raises(EngineError, match="v_scale of layer 0"):
        LLMEngine(folder, EngineConfig(kv_cache_dtype="float8_e4m3fn"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_cache_dtype": "int8"}, "expected auto, float8_e4m3fn, float8_e5m2, found int8"),
        ({"kv_cache_dtype": "float8_e4m3fn", "kv_cache_scales": ((1.0, 0.0),)}, "none that can be divided by"),
        ({"kv_cache_dtype": "float8_e4m3fn", "kv_cache_scales": ((1.0, 1.0),)}, "not of all layers"),
        ({"kv_cache_scales": ((1.0, 1.0),)}, "that has none"),
        ({"kv_cache_dtype": "float8_e4m3fn", "attention_backend": "recompute"}, "expected kv_cache_dtype auto"),
    ],
)
def test_what_is_refused(checkpoint: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        LLMEngine(checkpoint.folder, EngineConfig(**options))
