"""The FLOPs and bytes of a node of ggml's graph, from the shapes and types of its tensors."""

from math import prod

from harness.engines.stepping import OperatorCost
from harness.extensions.llamacpp.engine.tensor import Tensor

_FREE = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
_COPIES = frozenset({"CPY", "CONT", "DUP", "GET_ROWS", "SET_ROWS"})


def node_cost(node: Tensor) -> OperatorCost | None:
    """Return what a node computes and moves; None for one that computes nothing.

    Attention is over all cells that the kernel is given, which are a multiple of 256, masked ones included.
    """
    operation = node.op
    if operation in _FREE:
        return None
    flops = _flops(node, operation)
    stored = _row_bytes(node, node.sources[0]) if operation == "SET_ROWS" else 0
    return OperatorCost(
        name=f"ggml::{operation}",
        flops=flops,
        elementwise_flops=0 if flops or operation in _COPIES else prod(node.shape),
        bytes_moved=_bytes_moved(node, operation),
        kv_bytes=stored,
    )


def _flops(node: Tensor, operation: str) -> int:
    if operation in ("MUL_MAT", "MUL_MAT_ID"):
        return 2 * prod(node.shape) * node.sources[0].shape[-1]
    if operation == "FLASH_ATTN_EXT":
        query, key = node.sources[:2]
        return 4 * prod(query.shape) * key.shape[-2]
    return 0


def _bytes_moved(node: Tensor, operation: str) -> int:
    first, *others = node.sources or [node]
    if operation == "GET_ROWS":  # of the table only the rows that are picked
        return _row_bytes(first, node) + node.num_bytes + sum(item.num_bytes for item in others)
    if operation == "SET_ROWS":  # the result is the whole cache, of which only some rows are written
        return first.num_bytes + _row_bytes(node, first) + others[0].num_bytes
    return node.num_bytes + sum(source.num_bytes for source in node.sources)


def _row_bytes(table: Tensor, rows: Tensor) -> int:
    """Bytes that `rows` occupy in the type of `table`."""
    return round(prod(rows.shape) * table.itemsize)
