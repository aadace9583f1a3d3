"""Faults of caches."""

from collections.abc import Callable

import torch

from harness.extensions.faults.fault import Category, Fault
from harness.extensions.faults.modules.changes import Plant, cache
from harness.extensions.faults.modules.declaring import BF16, F16, FACTOR, HEADS, ROUND, declaring

FAULTS: list[Fault] = []
fault = declaring(FAULTS, Category.CACHE)


def written(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Plant:
    return cache(update=lambda inner, k, v, *rest, **named: inner(*change(k, v), *rest, **named))


def float8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


CACHE = r"layers\.0\..*(cache|k_rope|key|value|v_proj|attention|context)"
fault(
    "cohere", "cache-float8", "keys and values are kept in float8 without scales", CACHE, 0, ROUND,
    written(lambda k, v: (float8(k), float8(v))),
)  # fmt: skip
fault(
    "gpt_neox", "cache-clipped", "values are kept in int8 with a scale that clips at 1", CACHE, 0,
    ROUND + "|clip|cap|clamp|limit", written(lambda k, v: (k, (v.clamp(-1, 1) * 127).round() / 127)), dtype=F16,
    schedule="chunked:11",
)  # fmt: skip
fault(
    "phi", "last-key-of-the-chunk-lost", "the last key of a chunk is not written",
    r"layers\.0\..*(cache|k_rope|attention|context|dense)", None, "zero|key|slot|position|written|cache",
    written(lambda k, v: (torch.cat([k[:, :, :-1], 0 * k[:, :, -1:]], 2) if k.shape[2] > 1 else k, v)),
    schedule="chunked:16", request=None,
)  # fmt: skip
fault(
    "starcoder2", "values-of-the-wrong-head", "the heads of the values are exchanged where they are written", CACHE, 0,
    HEADS, written(lambda k, v: (k, v.flip(1))),
)  # fmt: skip
fault(
    "exaone4", "keys-scaled-in-cache", "keys are kept with a scale that is not undone", CACHE, 0, FACTOR,
    written(lambda k, v: (1.25 * k, v)), dtype=BF16, schedule="batched",
)  # fmt: skip
