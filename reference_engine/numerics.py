"""Torch's switches of the whole process that decide which kernels compute a step on a GPU: set for it, then put back.

Sums of a matrix product stay in float32 until the end: cuBLAS may otherwise add up the parts of a split product in 16
bits. cuDNN's attention is left out: torch prefers it on Hopper in 16 bits, and it plans anew for every key length, and
so in every step of decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["step_numerics"]


@contextmanager
def step_numerics() -> Iterator[None]:
    """Compute what is in this block with float32 sums, and without cuDNN's attention."""
    cuda, matmul = torch.backends.cuda, torch.backends.cuda.matmul
    before = (
        cuda.cudnn_sdp_enabled(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    _switch(False, False, False)
    try:
        yield
    finally:
        _switch(*before)


def _switch(has_cudnn_attention: bool, reduces_in_bfloat16: bool, reduces_in_float16: bool) -> None:
    torch.backends.cuda.enable_cudnn_sdp(has_cudnn_attention)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduces_in_bfloat16
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = reduces_in_float16
