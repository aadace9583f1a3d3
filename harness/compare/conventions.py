"""Conventions: legitimate orders of rounding that are not the default one, each with what it gives.

An operation that fails against the truth is held against each convention that applies to it; the one under which the
fewest rows fail is the engine's, and the operation is held to it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from harness.oracle.attention import visible_keys
from harness.oracle.model import HFModel
from harness.oracle.watch import AttentionCall, run_attention
from harness.taps import KINDS, ErrorModel, Kind, Operation

EAGER = "scores rounded to the engine's dtype"
PARTIAL_SUMS = "added up from {} parts, each rounded"
_NUM_RANKS = (2, 4, 8)
_EAGER_MODEL = ErrorModel(roundings=1, accumulation=25, products=8)
"""Attention against HF's eager code in the engine's dtype: a product of another shape lets a few scores round the other
way, each by a whole rounding."""
_ROW_PARALLEL = ("o_proj", "down_proj", "c_proj", "out_proj", "dense", "dense_4h_to_h", "fc2", "wo")
"""Names of the modules whose inputs tensor-parallel engines share out among their ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """One legitimate order of rounding, applied to the rows at hand."""

    name: str
    model: ErrorModel
    """What is left to rounding under it."""
    expected: Callable[[], torch.Tensor]
    """Compute what the rows should be: [rows, ...] float64."""


def conventions(
    hf: HFModel,
    operation: Operation,
    *,
    dtype: torch.dtype,
    rows: torch.Tensor,
    inputs: list[torch.Tensor],
    call: AttentionCall | None,
) -> Iterator[Convention]:
    """Yield the conventions that apply to an operation.

    Args:
        hf: the model, the operation's weights in it.
        operation: what failed.
        dtype: the engine's.
        rows: [rows] int64 indices into the batch, for attention.
        inputs: [rows, ...] each, of an operation that works row by row.
        call: of attention.
    """
    if operation.kind is Kind.ATTENTION and call is not None:
        eager = hf.eager_attention(call.module)
        if eager is not None:
            function = eager
            yield Convention(
                name=EAGER, model=_EAGER_MODEL, expected=lambda: _eager(call, function, dtype)[rows].to(torch.float64)
            )
    if operation.kind is Kind.LINEAR and operation.module.rpartition(".")[2] in _ROW_PARALLEL and len(inputs) == 1:
        module = hf.module(operation.module)
        for count in _NUM_RANKS:
            if inputs[0].flatten(1).shape[1] % count == 0:
                yield Convention(
                    name=PARTIAL_SUMS.format(count),
                    model=KINDS[Kind.LINEAR].error_model or _EAGER_MODEL,
                    expected=lambda count=count: _partial_sums(module, inputs[0], count, dtype),  # type: ignore[misc]
                )


def _eager(call: AttentionCall, function: Callable[..., object], dtype: torch.dtype) -> torch.Tensor:
    """Compute attention as HF's eager code does in the engine's dtype, scores rounded: [B * T, N*H]."""
    visible = visible_keys(call)
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    mask = mask.masked_fill(~visible, torch.finfo(dtype).min)
    low = replace(call, query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype), mask=mask)
    context = run_attention(low, function)[0]
    result: torch.Tensor = context.flatten(2).flatten(0, 1)
    return result


def _partial_sums(module: torch.nn.Module, x: torch.Tensor, num_parts: int, dtype: torch.dtype) -> torch.Tensor:
    """Compute a product as that many ranks do: [rows, outputs] float64, not yet rounded.

    Each has a share of the inputs, and what it makes of it is rounded to `dtype` before all are added up; the first
    adds the bias.
    """
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    bias: torch.Tensor | None = getattr(module, "bias", None)
    x = x.to(torch.float64).flatten(1)
    if weight.shape[1] != x.shape[1]:  # HF's Conv1D keeps its weight as [in, out]
        weight = weight.T
    size = x.shape[1] // num_parts
    total = torch.zeros(len(x), weight.shape[0], dtype=torch.float64, device=x.device)
    for part in range(num_parts):
        own = slice(part * size, (part + 1) * size)
        share = x[:, own] @ weight[:, own].to(torch.float64).T
        if bias is not None and not part:
            share = share + bias.to(torch.float64)
        total = total + share.to(dtype).to(torch.float64)
    return total
