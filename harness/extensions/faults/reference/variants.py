"""Legitimate differences between engines: none of them may alarm."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch.nn.functional import linear, silu

import reference_engine.attention.paged
from harness.extensions.faults.fault import FaultConfig, Variant
from harness.extensions.faults.reference import conventions
from harness.extensions.faults.reference.attention import merge_exactly, split_decode
from harness.extensions.faults.reference.injection import replacing
from reference_engine.batch import Batch
from reference_engine.block_pool import BlockPool
from reference_engine.layers import MLP, Linear, RMSNorm

MODELS = ("llama-tiny", "qwen2-tiny", "qwen3-tiny")
DTYPES = ("float32", "bfloat16", "float16")
_BLOCK = 8
_SHORT = ((5,), tuple(range(20, 20 + _BLOCK)), tuple(range(60, 61 + _BLOCK)))
"""Prompts of one token, of a block exactly, of a block and one."""


def _permuted(init: Callable[..., None], self: BlockPool, *args: Any, **kwargs: Any) -> None:
    """Blocks are handed out in any order."""
    init(self, *args, **kwargs)
    blocks = list(self._unused)
    Random(0).shuffle(blocks)
    self._unused.clear()
    self._unused.extend(blocks)


def _weight_before_cast(original: Any, self: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """The norm's weight is multiplied in float32, before the result is rounded, as some versions of HF do."""
    x32 = x.to(torch.float32)
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
    return (self.weight_X.to(torch.float32) * normed).to(x.dtype)


def _unfused(original: Any, self: Linear, x: torch.Tensor) -> torch.Tensor:
    """Stacked projections are computed in pieces of 16 outputs, as separate modules would."""
    weights = self.weight_OI.split(16)
    biases = [None] * len(weights) if self.bias_O is None else self.bias_O.split(16)
    return torch.cat([linear(x, w, b) for w, b in zip(weights, biases, strict=True)], dim=-1)


def _activation_in_float32(original: Any, self: MLP, x: torch.Tensor, batch: Batch, prefix: str) -> torch.Tensor:
    """silu(gate) * up is rounded once, as in fused kernels: HF rounds silu, too, on a coarse grid in one direction."""
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
    act = (silu(gate.to(torch.float32)) * up.to(torch.float32)).to(x.dtype)
    out = self.down_proj(act)
    for name, value in (("gate_proj", gate), ("up_proj", up), ("act", act), ("down_proj", out)):
        batch.tap(prefix, f"mlp.{name}", value)
    return out


def _row_by_row(
    original: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Decode attends one request at a time."""
    rows = [slice(row, row + 1) for row in range(len(q))]
    return torch.cat([original(q[row], k[row], v[row], None if mask is None else mask[row]) for row in rows])


_PLANTED = {
    "blocks-permuted": replacing((BlockPool, "__init__", _permuted)),
    "norm-weight-before-cast": replacing((RMSNorm, "__call__", _weight_before_cast)),
    "activation-in-float32": replacing((MLP, "__call__", _activation_in_float32)),
    "projections-unfused": replacing((Linear, "__call__", _unfused)),
    "decode-row-by-row": replacing((reference_engine.attention.paged, "attend_single", _row_by_row)),
    "split-kv": split_decode(merge_exactly),
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "block-size-1": {"options": {"block_size": "1"}},
    "block-size-256": {"options": {"block_size": "256"}},
    "contiguous": {"options": {"attention_backend": "contiguous"}},
    "recompute": {"options": {"attention_backend": "recompute"}},
    "one-at-a-time": {"schedule": "plain"},
    "chunks-of-3": {"schedule": "chunked:3"},
    "chunks-of-a-block": {"schedule": f"mixed:{_BLOCK}"},
    "prefix-hit": {"schedule": "prefix-hit"},
    "forked": {"schedule": "forked"},
    "preempted": {"schedule": "preempted"},
    "rewound": {"schedule": "rewound", "max_new_tokens": 9},
    "speculative": {"schedule": "speculative", "max_new_tokens": 14},
    "speculative-blocks-of-2": {"schedule": "speculative:5", "max_new_tokens": 14, "options": {"block_size": "2"}},
    "short-prompts": {"prompts": _SHORT},
    "free-blocks-poisoned": {"options": {"debug_checks": "true"}},
}


def variants() -> Iterator[Variant]:
    """Yield every variant of every model and dtype."""
    for model in MODELS:
        for dtype in DTYPES:
            for attention in ("eager", "sdpa"):
                setting = FaultConfig(
                    model=model, dtype=dtype, options={"attention": attention}, schedule=_hf_schedule(attention, dtype)
                )
                yield _variant(f"hf-{attention}", setting, engine_name="hf")
            for name, fields in _SETTINGS.items():
                yield _variant(name, FaultConfig(model=model, dtype=dtype, **fields))
            for name, inject in _PLANTED.items():
                yield _variant(name, FaultConfig(model=model, dtype=dtype), inject=inject)
    yield from conventions.variants()


def _hf_schedule(attention: str, dtype: str) -> str:
    """Padded or not: HF's eager attention in float16 is wrong under padding, and that is no variant.

    A row of padding sees nothing, so its scores are -65504 plus something: below -16 that is -inf throughout, the
    softmax gives NaN, and 0 * NaN reaches the other rows of its request (seen on llama-tiny under transformers 5.23).
    """
    return "plain" if (attention, dtype) == ("eager", "float16") else "batched"


def _variant(name: str, setting: FaultConfig, **rest: Any) -> Variant:
    return Variant(id=f"{name}/{setting.model}/{setting.dtype}", summary=name, setting=setting, **rest)
