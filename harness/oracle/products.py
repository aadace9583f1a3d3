"""Matrix products of the truth: on a CPU every thread computes as many of the output features as every other.

MKL splits a float64 product of some hundred rows badly: 259 rows by a matrix of 3072 x 1024 take 18 ms with four
threads, of which two do nothing, and 6 ms in four blocks (reports/cpu/check-cost.md).
"""

import torch
from torch.nn import functional

_LEAST_ELEMENTS = 1 << 18
"""Of a weight that is worth more than one thread."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply `functional.linear`: x [..., in], weight [out, in], bias [out]; returns [..., out]."""
    num_blocks = torch.get_num_threads()
    if not _is_split(x, weight, num_blocks):
        return functional.linear(x, weight, bias)
    num_out, num_in = weight.shape
    rows, blocks = x.reshape(-1, num_in), weight.view(num_blocks, num_out // num_blocks, num_in)
    y = torch.bmm(rows.expand(num_blocks, -1, -1), blocks.mT).transpose(0, 1).reshape(*x.shape[:-1], num_out)
    return y if bias is None else y.add_(bias)


def _is_split(x: torch.Tensor, weight: torch.Tensor, num_blocks: int) -> bool:
    is_alike = x.dtype == weight.dtype == torch.float64 and x.device.type == "cpu"
    is_large = weight.dim() == 2 and weight.numel() >= _LEAST_ELEMENTS and weight.is_contiguous()
    return is_alike and is_large and num_blocks > 1 and len(weight) % num_blocks == 0
