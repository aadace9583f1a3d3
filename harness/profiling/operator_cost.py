"""Cost of one dispatched operator, from its arguments: FLOPs, elements, bytes read and written.

FLOPs are those of matrix products and of attention; a multiply-add counts as two, as is usual for MFU (Chowdhery et
al. 2022, appendix B). Pointwise work is counted separately, one for each element. The operators of the reference
engine have formulas of their own, because no counter knows its kernels.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from harness.profiling.formulas import causal_pairs, visible_pairs

Arguments = Mapping[str, Any]
"""An operator's arguments by the names of its schema."""
Span = tuple[int, int]
"""Rows of a request, and its tokens up to the last of them."""


def _nothing(_arguments: Arguments) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """The cost of one operator."""

    bytes_moved: Callable[[Arguments], int]
    flops: Callable[[Arguments], int] = _nothing
    elementwise_flops: Callable[[Arguments], int] = _nothing
    written_from: Mapping[str, str] = field(default_factory=dict)
    """For a written argument, the argument whose size is written; without an entry all of it is written."""


def _decoded(arguments: Arguments) -> list[Span]:
    return [(1, context_len) for context_len in arguments["context_lens"].tolist() if context_len]


def _prefilled(arguments: Arguments) -> list[Span]:
    """Put the tiles of each request together."""
    spans: dict[int, Span] = {}
    for request, _, num_rows, position in arguments["tiles"].tolist():
        before, _ = spans.get(request, (0, 0))
        spans[request] = before + num_rows, position + num_rows
    return list(spans.values())


def _kernel_attention_flops(arguments: Arguments, spans: Iterable[Span]) -> int:
    """2 for q k and 2 for p v, times the head's size, for each pair of a query and a key that it sees."""
    num_heads, head_dim = arguments["q"].shape[1:]
    num_pairs = sum(visible_pairs(*span, arguments.get("window")) for span in spans)
    return int(4 * num_pairs * num_heads * head_dim)


def _kernel_attention_bytes(arguments: Arguments, spans: Iterable[Span]) -> int:
    """Add up queries, outputs, and K and V of the keys that some row of a request sees, each once."""
    q, k_cache, window = arguments["q"], arguments["k_cache"], arguments.get("window")
    num_rows = num_keys = 0
    for own_rows, context_len in spans:
        num_rows += own_rows
        num_keys += context_len if window is None else min(context_len, own_rows + window - 1)
    per_row, per_key = 2 * q[0].numel(), 2 * k_cache[0, 0].numel()
    return int(num_rows * per_row * q.element_size() + num_keys * per_key * k_cache.element_size())


def _attention(spans: Callable[[Arguments], list[Span]]) -> KernelCost:
    return KernelCost(
        flops=lambda arguments: _kernel_attention_flops(arguments, spans(arguments)),
        bytes_moved=lambda arguments: _kernel_attention_bytes(arguments, spans(arguments)),
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
        bytes_moved=lambda arguments: (
            _nbytes(arguments["k"], arguments["v"], arguments["slots"])
            + (arguments["k"].numel() + arguments["v"].numel()) * arguments["k_cache"].element_size()
        ),
        written_from={"k_cache": "k", "v_cache": "v"},
    ),
    "paged_decode": _attention(_decoded),
    "paged_prefill": _attention(_prefilled),
    "rms_norm": KernelCost(
        elementwise_flops=lambda arguments: 4 * arguments["x"].numel() + 2 * len(arguments["x"]),
        bytes_moved=lambda arguments: 2 * _nbytes(arguments["x"]) + _nbytes(arguments["weight"]),
    ),
    "add_norm": KernelCost(
        elementwise_flops=lambda arguments: 5 * arguments["x"].numel() + 2 * len(arguments["x"]),
        bytes_moved=lambda arguments: 4 * _nbytes(arguments["x"]) + _nbytes(arguments["weight"]),
    ),
    "norm_rotate": KernelCost(
        elementwise_flops=_rotation_flops,
        bytes_moved=lambda arguments: (
            (2 + arguments.get("keeps_normed", False)) * _rotated(arguments) * arguments["qkv"].element_size()
            + _nbytes(arguments["cos"], arguments["sin"])
        ),
    ),
    "linear": KernelCost(
        flops=lambda arguments: 2 * len(arguments["x"]) * arguments["weight"].numel(),
        bytes_moved=lambda arguments: (
            _nbytes(arguments["x"], arguments["weight"])
            + len(arguments["x"]) * len(arguments["weight"]) * arguments["weight"].element_size()
            + (0 if arguments.get("bias") is None else _nbytes(arguments["bias"]))
        ),
    ),
    "silu_mul": KernelCost(
        elementwise_flops=lambda arguments: arguments["gate_up"].numel(),
        bytes_moved=lambda arguments: _nbytes(arguments["gate_up"]) * 3 // 2,
    ),
}

KERNELS: Mapping[str, KernelCost] = {
    f"{library}::{name}": cost
    for library in ("reference_engine", "reference_engine_cpu")
    for name, cost in _KERNELS.items()
}
"""Costs by operator, of the Triton kernels and the C++ kernels."""


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage behind the tensors by its address."""
    return dict(_storage(tensor) for tensor in tensors)


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.is_mkldnn:
        return int(torch.ops.mkldnn.data_ptr(tensor)), int(torch.ops.mkldnn._nbytes(tensor))
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


_REDUCTIONS = {"aten::mean", "aten::sum", "aten::amax", "aten::amin", "aten::argmax", "aten::_softmax"}
_COPIES = {"aten::clone", "aten::copy_", "aten::_to_copy", "aten::lift_fresh", "aten::fill_", "aten::zero_"}
"""Pointwise by their tags, but nothing is computed."""
_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
                "aten::empty_permuted"}  # fmt: skip
"""They reserve memory and touch none of it."""
_GATHERS = {"aten::embedding", "aten::index_select", "aten::index", "aten::gather"}
"""They read as much of their first tensor as they return."""
_WRITTEN_FROM = {"aten::index_copy_": "source", "aten::index_put_": "values", "aten::copy_": "src",
                 "aten::scatter_": "src"}  # fmt: skip
"""The argument that says how much of the written tensor is written; of other operators, all of it."""


def bind(operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; what is left to its default is absent."""
    names = [argument.name for argument in operator._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def flops(name: str, arguments: Arguments) -> int:
    """Return the FLOPs of a matrix product or of attention, and 0 for any other operator.

    Of attention only the scores that the mask keeps are counted, whatever the kernel computes. A product over an inner
    dimension of 1 adds nothing up and counts as pointwise.
    """
    formula = KERNELS[name].flops if name in KERNELS else _FLOPS.get(name)
    return 0 if formula is None else formula(arguments)


def elementwise_flops(operator: torch._ops.OpOverload, name: str, arguments: Arguments, result: Any) -> int:
    """Return one for each element of a pointwise operator's result, or of a reduction's input."""
    if name in KERNELS:
        return KERNELS[name].elementwise_flops(arguments)
    if name in _COPIES:
        return 0
    if name in _REDUCTIONS:
        return max((tensor.numel() for tensor in tensors(arguments)), default=0)
    is_outer_product = name in ("aten::mm", "aten::bmm") and _inner_dim(arguments) == 1
    if torch.Tag.pointwise in operator.tags or is_outer_product:
        return max((tensor.numel() for tensor in tensors(result)), default=0)
    return 0


def bytes_moved(operator: torch._ops.OpOverload, name: str, arguments: Arguments, result: Any) -> int:
    """Return the bytes that the operator has to read and to write; 0 for a view, and for an allocation."""
    if name in KERNELS:
        return KERNELS[name].bytes_moved(arguments)
    if name in _ALLOCATIONS or _is_view(operator, result, arguments):
        return 0
    written = {argument.name for argument in operator._schema.arguments if is_written(argument)}
    read = [tensor for key, value in arguments.items() if key not in written for tensor in tensors(value)]
    num_read = sum(tensor.nbytes for tensor in read)
    if name in _GATHERS and read:
        num_read += sum(tensor.nbytes for tensor in tensors(result)) - read[0].nbytes
    if written:
        return num_read + sum(written_bytes(name, arguments, key) for key in written)
    return num_read + sum(tensor.nbytes for tensor in tensors(result))


def written_bytes(name: str, arguments: Arguments, key: str) -> int:
    """Return the bytes that are written to an argument."""
    source = KERNELS[name].written_from.get(key) if name in KERNELS else _WRITTEN_FROM.get(name)
    targets = tensors(arguments.get(key))
    if source is None or not isinstance(arguments.get(source), torch.Tensor):
        return sum(tensor.nbytes for tensor in targets)
    return int(arguments[source].numel() * targets[0].element_size())


def is_written(argument: Any) -> bool:
    """Whether the operator writes to this argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree of arguments or results."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_view(operator: torch._ops.OpOverload, result: Any, arguments: Arguments) -> bool:
    """Whether every result shares its storage with an input and nothing is written."""
    if any(is_written(argument) for argument in operator._schema.arguments):
        return False
    made = storages(tensors(result))
    return bool(made) and set(made) <= set(storages(tensors(arguments)))


def _inner_dim(arguments: Arguments) -> int:
    return int(_operands(arguments)[0].shape[-1])


def _operands(arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = ("mat1", "mat2") if "mat1" in arguments else ("batch1", "batch2")
    if left not in arguments:
        left, right = "self", "mat2"
    return arguments[left], arguments[right]


def _product_flops(arguments: Arguments) -> int:
    left, right = _operands(arguments)
    inner = left.shape[-1]
    return 0 if inner == 1 else int(2 * left.numel() * right.shape[-1])


def _packed_product_flops(arguments: Arguments) -> int:
    """Of oneDNN's linear layer: [rows, in] times a packed [out, in]."""
    return int(2 * arguments["X"].numel() * arguments["W"].shape[0])


def _attention_flops(arguments: Arguments) -> int:
    """2 for q k and 2 for p v, times the head's size, for each pair of a query and a key that it sees."""
    query, key = arguments["query"], arguments["key"]
    batch, num_heads, num_queries, head_dim = query.shape
    num_keys = key.shape[-2]
    mask = arguments.get("attn_mask", arguments.get("attn_bias"))
    if mask is not None:
        num_pairs = _kept(mask.expand(batch, num_heads, num_queries, num_keys))
    elif arguments.get("is_causal", False):
        num_pairs = batch * num_heads * causal_pairs(num_queries, num_keys)
    else:
        num_pairs = batch * num_heads * num_queries * num_keys
    return int(2 * num_pairs * (head_dim + arguments["value"].shape[-1]))


def _kept(mask: torch.Tensor) -> int:
    """Count what a mask keeps; an additive one drops what it adds minus infinity, or the lowest number, to."""
    if mask.dtype == torch.bool:
        return int(mask.sum())
    return int((mask > torch.finfo(mask.dtype).min).sum())


_FLOPS: Mapping[str, Callable[[Arguments], int]] = {
    **dict.fromkeys(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"), _product_flops),
    "mkldnn::_linear_pointwise": _packed_product_flops,
    **dict.fromkeys(
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
        ),
        _attention_flops,
    ),
}
