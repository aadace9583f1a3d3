"""Faults of number formats: 8-bit weights and caches, clipping, 16-bit sums, overflow."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from harness.extensions.faults.fault import ANY_ROW, FIRST, Category, Fault, Row, table_of
from harness.extensions.faults.reference.cache import stored
from harness.extensions.faults.reference.norm import edited_layers
from harness.extensions.faults.reference.weights import Weights, loaded
from reference_engine.layers import MLP, Linear
from reference_engine.model import DecoderLayer

_DOWN, _K_CACHE = "model.layers.0.mlp.down_proj", "model.layers.0.k_cache"
_ATTENTION = "model.layers.0.attention"
_INT8, _FP8 = 127, 448.0
_NEAR_ROUNDING = ANY_ROW
"""The error is of 2 to 3 roundings, and sound ones reach 2.3: the tokens decide which row is beyond that."""
Change = Callable[[torch.Tensor], torch.Tensor]


def _int8(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Round to 255 levels between minus and plus the largest magnitude along a dimension."""
    scale = x.float().abs().amax(dim=dim, keepdim=True).clamp(min=1e-12) / _INT8
    return ((x.float() / scale).round() * scale).to(x.dtype)


def _int8_in_groups(x: torch.Tensor, size: int = 32) -> torch.Tensor:
    return _int8(x.unflatten(-1, (-1, size)), -1).flatten(-2)


def _fp8(x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def _cut_off(x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Drop the bits that the dtype has no room for, as a shift does, instead of rounding."""
    bits = {torch.bfloat16: 16, torch.float16: 13}[dtype]
    return (x.float().view(torch.int32) & -(1 << bits)).view(torch.float32).to(x.dtype)


def _weights(change: Change) -> Any:
    def changed(weights: Weights, config: Any) -> None:
        for name in weights:
            if name.endswith("mlp.down_proj.weight"):
                weights[name] = change(weights[name])

    return loaded(changed)


def _cached(change: Change) -> Any:
    return stored(lambda cache, k, v, slots: (change(k), change(v), slots))


class _Product:
    """A product that is computed another way: `compute` gets the input, the weight in float32 and the dtype."""

    def __init__(self, linear: Linear, compute: Callable[..., torch.Tensor]) -> None:
        self.linear, self.compute = linear, compute

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight_OI
        weight = weight.to_dense() if weight.is_mkldnn else weight
        return self.compute(x.float(), weight.float(), x.dtype).to(x.dtype)


def _products(compute: Callable[..., torch.Tensor]) -> Any:
    def edit(layer: DecoderLayer) -> DecoderLayer:
        assert isinstance(layer.mlp, MLP)
        product = _Product(layer.mlp.down_proj, compute)  # type: ignore[arg-type]
        return replace(layer, mlp=replace(layer.mlp, down_proj=product))

    return edited_layers(edit)


def _summed_in_pieces(size: int) -> Callable[..., torch.Tensor]:
    """Keep the sum in the engine's dtype, and add the product of `size` inputs at a time to it."""

    def compute(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        total = torch.zeros(len(x), len(weight), dtype=dtype, device=x.device)
        for at in range(0, x.shape[1], size):
            total = total + (x[:, at : at + size] @ weight[:, at : at + size].T).to(dtype)
        return total

    return compute


def _cut_off_product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _cut_off(x @ weight.T, dtype)


def _overflowing_product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sums of pieces in float16, whose limit some of them pass."""
    return _summed_in_pieces(16)(x, weight, torch.float16)


def _one_bit(cache: Any, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> Any:
    """The lowest bit of the exponent of one element of every key is flipped."""
    k = k.clone()
    bit = 1 << {torch.bfloat16: 7, torch.float16: 10}[k.dtype]
    k[:, 0, 3] = (k[:, 0, 3].contiguous().view(torch.int16) ^ bit).view(k.dtype)
    return k, v, slots


def _gained(cache: Any, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> Any:
    """The scale of a quantised cache is applied when keys are written, and not when they are read."""
    return k * 0.5, v, slots


_number = table_of(category=Category.NUMBERS, row=FIRST)


def _fault(id: str, summary: str, inject: Any, cause: str, tap: str, dtype: str, *row: Row, **rest: Any) -> Fault:
    return _number(id, summary, inject, cause, tap, *row, dtype=dtype, **rest)


_BF16, _FP16, _FP32 = "bfloat16", "float16", "float32"
FAULTS = [
    _fault("weight-int8", "A weight is in 8 bits, one scale for each output.", _weights(lambda w: _int8(w, 1)),
           "weight is in int8", _DOWN, _FP32),
    _fault("weight-int8-in-bfloat16", "A weight is in 8 bits, one scale for each output.",
           _weights(lambda w: _int8(w, 1)), "weight is in int8", _DOWN, _BF16, _NEAR_ROUNDING),
    _fault("weight-int8-groups", "A weight is in 8 bits, one scale for 32 inputs.", _weights(_int8_in_groups),
           "weight is in int8.*32", _DOWN, _FP16),
    _fault("weight-fp8", "A weight is in float8, one scale for all of it.",
           _weights(lambda x: _fp8(x, x.float().abs().amax() / _FP8)),
           "weight is in float8_e4m3fn", _DOWN, _BF16),
    _fault("weight-fp8-unscaled", "A weight is in float8 without a scale.", _weights(_fp8),
           "weight is in float8_e4m3fn", _DOWN, _FP16),
    _fault("weight-cut-off", "A weight in float32 loses its lower 16 bits.", _weights(_cut_off),
           "weight is cut off.*bfloat16", _DOWN, _FP32),
    _fault("cache-fp8", "The cache is in float8.", _cached(_fp8), "lower dtype: float8_e4m3fn", _K_CACHE, _BF16),
    _fault("cache-fp8-scaled", "The cache is in float8 with a scale of a tenth.", _cached(lambda x: _fp8(x, 0.1)),
           "lower dtype: float8_e4m3fn", _K_CACHE, _FP16),
    _fault("cache-int8", "The cache is in 8 bits, one scale for each head of a token.", _cached(lambda x: _int8(x, -1)),
           "lower dtype: int8", _K_CACHE, _FP16),
    _fault("cache-int8-rows", "The cache is in 8 bits, one scale for each token.",
           _cached(lambda x: _int8(x.flatten(1), -1).view_as(x)), "lower dtype: int8", _K_CACHE, _BF16),
    _fault("cache-cut-off", "Keys and values lose their lower 16 bits in the cache.", _cached(_cut_off),
           "cut off.*bfloat16", _K_CACHE, _FP32),
    _fault("cache-one-bit", "One bit of an element of every key is flipped in the cache.", stored(_one_bit),
           "bit", _K_CACHE, _BF16),
    _fault("cache-heads-swapped", "The KV heads of the keys are stored in the reverse order.",
           stored(lambda cache, k, v, slots: (k.flip(1), v, slots)),
           "heads.*another order", _K_CACHE, _BF16),
    _fault("cache-scale-forgotten", "Keys come back at half their size.", stored(_gained), "gain of 0.5", _K_CACHE,
           _FP16),
    _fault("sums-bf16", "A product keeps its sum in bfloat16, 4 inputs at a time.", _products(_summed_in_pieces(4)),
           "sum.*bfloat16", _DOWN, _BF16),
    _fault("sums-fp16", "A product keeps its sum in float16, 8 inputs at a time.", _products(_summed_in_pieces(8)),
           "sum.*float16", _DOWN, _FP16),
    _fault("product-cut-off", "The result of a product is cut off to bfloat16 instead of rounded.",
           _products(_cut_off_product), "cut off", _DOWN, _BF16, _NEAR_ROUNDING),
    _fault("product-cut-off-fp16", "The result of a product is cut off to float16 instead of rounded.",
           _products(_cut_off_product), "cut off", _DOWN, _FP16, _NEAR_ROUNDING),
    _fault("sum-overflow-fp16", "A product in bfloat16 keeps its sum in float16, which overflows.",
           _products(_overflowing_product), "overflow of float16", _DOWN, _BF16,
           scaled={"model.layers.0.mlp.up_proj.weight": 3e5}),
]  # fmt: skip
