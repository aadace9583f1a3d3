"""Cost of the reference engine's own operators, from their arguments: no other counter knows its kernels.

Of attention through block tables the lengths say which keys are read; they are on the device, which is waited for.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.profiling.cost.pairs import visible_pairs

Arguments = Mapping[str, Any]
Span = tuple[int, int]
"""Rows of a request, and its tokens up to the last of them."""


def _nothing(_arguments: Arguments) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """Of one operator."""

    bytes_moved: Callable[[Arguments], int]
    flops: Callable[[Arguments], int] = _nothing
    elementwise_flops: Callable[[Arguments], int] = _nothing
    written_from: Mapping[str, str] = field(default_factory=dict)
    """The argument that says how much of a written one is written; of others, all."""


def _decoded(arguments: Arguments) -> list[Span]:
    return [(1, context_len) for context_len in arguments["context_lens"].tolist() if context_len]


def _prefilled(arguments: Arguments) -> list[Span]:
    """Put the tiles of each request together."""
    spans: dict[int, Span] = {}
    for request, _, num_rows, position in arguments["tiles"].tolist():
        before, _ = spans.get(request, (0, 0))
        spans[request] = before + num_rows, position + num_rows
    return list(spans.values())


def _attention_flops(arguments: Arguments, spans: Iterable[Span]) -> int:
    """2 for q k and 2 for p v, times the head's size, for each pair of a query and a key that it sees."""
    num_heads, head_dim = arguments["q"].shape[1:]
    num_pairs = sum(visible_pairs(*span, arguments.get("window")) for span in spans)
    return int(4 * num_pairs * num_heads * head_dim)


def _attention_bytes(arguments: Arguments, spans: Iterable[Span]) -> int:
    """Add up queries and what comes of them, and K and V of the keys that some row of a request sees, each once."""
    q, k_cache, window = arguments["q"], arguments["k_cache"], arguments.get("window")
    num_rows = num_keys = 0
    for own_rows, context_len in spans:
        num_rows += own_rows
        num_keys += context_len if window is None else min(context_len, own_rows + window - 1)
    per_row, per_key = 2 * q[0].numel(), 2 * k_cache[0, 0].numel()
    return int(num_rows * per_row * q.element_size() + num_keys * per_key * k_cache.element_size())


def _attention(spans: Callable[[Arguments], list[Span]]) -> KernelCost:
    return KernelCost(
        flops=lambda arguments: _attention_flops(arguments, spans(arguments)),
        bytes_moved=lambda arguments: _attention_bytes(arguments, spans(arguments)),
    )


def _rotated(arguments: Arguments) -> int:
    """Count the elements of q and k."""
    heads = arguments["num_heads"] + arguments["num_kv_heads"]
    return int(len(arguments["qkv"]) * heads * arguments["cos"].shape[-1])


def _rotation_flops(arguments: Arguments) -> int:
    """Two products and a sum of each element and a sign of every other one; four of each where heads are normed."""
    elements = _rotated(arguments)
    return 3 * elements + elements // 2 + (0 if arguments.get("q_weight") is None else 4 * elements)


def _nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


_KERNELS: Mapping[str, KernelCost] = {
    "store_kv": KernelCost(
        bytes_moved=lambda own: (
            _nbytes(own["k"], own["v"], own["slots"])
            + (own["k"].numel() + own["v"].numel()) * own["k_cache"].element_size()
        ),
        written_from={"k_cache": "k", "v_cache": "v"},
    ),
    "paged_decode": _attention(_decoded),
    "paged_prefill": _attention(_prefilled),
    "rms_norm": KernelCost(
        elementwise_flops=lambda own: 4 * own["x"].numel() + 2 * len(own["x"]),
        bytes_moved=lambda own: 2 * _nbytes(own["x"]) + _nbytes(own["weight"]),
    ),
    "add_norm": KernelCost(
        elementwise_flops=lambda own: 5 * own["x"].numel() + 2 * len(own["x"]),
        bytes_moved=lambda own: 4 * _nbytes(own["x"]) + _nbytes(own["weight"]),
    ),
    "norm_rotate": KernelCost(
        elementwise_flops=_rotation_flops,
        bytes_moved=lambda own: (
            (2 + own.get("keeps_normed", False)) * _rotated(own) * own["qkv"].element_size()
            + _nbytes(own["cos"], own["sin"])
        ),
    ),
    "linear": KernelCost(
        flops=lambda own: 2 * len(own["x"]) * own["weight"].numel(),
        bytes_moved=lambda own: (
            _nbytes(own["x"], own["weight"])
            + len(own["x"]) * len(own["weight"]) * own["weight"].element_size()
            + (0 if own.get("bias") is None else _nbytes(own["bias"]))
        ),
    ),
    "silu_mul": KernelCost(
        elementwise_flops=lambda own: own["gate_up"].numel(),
        bytes_moved=lambda own: _nbytes(own["gate_up"]) * 3 // 2,
    ),
}

KERNELS: Mapping[str, KernelCost] = {
    f"{library}::{name}": cost
    for library in ("reference_engine", "reference_engine_cpu")
    for name, cost in _KERNELS.items()
}
"""By operator: those of Triton, and those in C++."""
