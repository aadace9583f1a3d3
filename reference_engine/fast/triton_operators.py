"""The Triton kernels as operators of torch: `reference_engine::paged_decode` and so on.

A kernel that is launched behind torch's back is in no profile and no count. Listeners of the
dispatcher see an operator, by name and with its arguments, for some 4 us a call. Its schema marks what it writes to.
Imported only where Triton is, when the backend `triton` is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from reference_engine.fast.kernels.add_norm import add_norm as launch_add_norm
from reference_engine.fast.kernels.add_norm import rms_norm as launch_rms_norm
from reference_engine.fast.kernels.int8_product import int8_product
from reference_engine.fast.kernels.norm_rotate import norm_rotate as launch_norm_rotate
from reference_engine.fast.kernels.paged_decode import MIN_SPLIT_KEYS
from reference_engine.fast.kernels.paged_decode import paged_decode as launch_paged_decode
from reference_engine.fast.kernels.paged_prefill import paged_prefill as launch_paged_prefill
from reference_engine.fast.kernels.row_product import row_product
from reference_engine.fast.kernels.silu_mul import silu_mul as launch_silu_mul
from reference_engine.fast.kernels.store_kv import store_kv as launch_store_kv
from reference_engine.fast.kernels.tiling import Tiling, find_tiling

__all__ = [
    "add_norm", "linear", "linear_float8", "linear_int8", "norm_rotate", "paged_decode", "paged_prefill", "rms_norm",
    "silu_mul", "store_kv",
]  # fmt: skip

_LIBRARY = torch.library.Library("reference_engine", "DEF")
_SCALES = "float k_scale=1.0, float v_scale=1.0"
_tiling: Callable[[int, torch.dtype], Tiling] = cache(find_tiling)


def _operator(schema: str, launch: Callable[..., Any]) -> torch._ops.OpOverload:
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, launch, "CompositeExplicitAutograd")
    if schema.endswith("-> ()"):  # so that compiled layers can call it
        torch.library.register_fake(f"reference_engine::{name}", lambda *args, **kwargs: None, lib=_LIBRARY)
    operator = getattr(torch.ops.reference_engine, name).default
    assert isinstance(operator, torch._ops.OpOverload)
    return operator


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    window: int | None = None,
    min_split_keys: int = MIN_SPLIT_KEYS,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    launch_paged_decode(
        q, k_cache, v_cache, block_tables, context_lens, out, window=window,
        tiling=_tiling(q.shape[-1], q.dtype), min_split_keys=min_split_keys, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


def _prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    launch_paged_prefill(
        q, k_cache, v_cache, block_tables, tiles, out, window=window, tiling=_tiling(q.shape[-1], q.dtype),
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


store_kv = _operator(
    f"store_kv(Tensor k, Tensor v, Tensor slots, Tensor(a!) k_cache, Tensor(b!) v_cache, *, {_SCALES}) -> ()",
    launch_store_kv,
)
paged_decode = _operator(
    "paged_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor context_lens, Tensor(a!) out, "
    f"*, int? window=None, int min_split_keys={MIN_SPLIT_KEYS}, {_SCALES}) -> ()",
    _decode,
)
paged_prefill = _operator(
    "paged_prefill(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor tiles, Tensor(a!) out, *, "
    f"int? window=None, {_SCALES}) -> ()",
    _prefill,
)
rms_norm = _operator("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", launch_rms_norm)
add_norm = _operator("add_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)", launch_add_norm)
norm_rotate = _operator(
    "norm_rotate(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float eps, int num_heads, "
    "int num_kv_heads, bool keeps_normed=False) -> (Tensor, Tensor)",
    launch_norm_rotate,
)
silu_mul = _operator("silu_mul(Tensor gate_up) -> Tensor", launch_silu_mul)
linear = _operator("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", row_product)
linear_float8 = _operator(
    "linear_float8(Tensor x, Tensor weight, Tensor? bias, Tensor scale, int block) -> Tensor", row_product
)
linear_int8 = _operator(
    "linear_int8(Tensor x, Tensor row_scale, Tensor weight, Tensor scale, Tensor? bias, ScalarType dtype) -> Tensor",
    int8_product,
)
