"""The tokens of a dump: told by the rows of its embedding, where they are not those that were named."""

from collections.abc import Sequence

import torch

from harness.engines.by_content.hf_run import EndOfRun, run_hf
from harness.formats.taps import Kind, Operation
from harness.formats.tensors import NamedTensor
from harness.oracle.model import HFModel

_CHUNK = 16384
_NUM_PROJECTIONS = 3
_FIRST_ROWS = 4
"""Rows that are looked at first: a tensor with no token among them is no embedding."""
_SHARE = 0.9
"""Rows of a tensor that must be a token's for the tensor to be an embedding."""


def embedded_tokens(hf: HFModel, tensors: Sequence[NamedTensor], tolerance: float) -> tuple[str, list[int]] | None:
    """Return the name of a tensor whose rows are embeddings, and their tokens, -1 for a row that is none.

    Args:
        hf: the model.
        tensors: of the dump.
        tolerance: relative error of a row.
    """
    operation = next((op for op in hf.graph if op.kind is Kind.EMBEDDING), None)
    if operation is None:
        return None
    (width,) = operation.shape
    probes = torch.randn(width, _NUM_PROJECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    known, norms = _vocabulary(hf, operation, probes)
    for tensor in tensors:
        if tensor.tensor.dim() < 2 or tensor.tensor.shape[-1] != width:
            continue
        rows = tensor.tensor.reshape(-1, width).double() @ probes  # [rows, projections]
        told = [_token(row, known, norms, tolerance) for row in rows[:_FIRST_ROWS]]
        if any(token >= 0 for token in told):
            told += [_token(row, known, norms, tolerance) for row in rows[_FIRST_ROWS:]]
        if sum(token >= 0 for token in told) >= _SHARE * len(told):
            return tensor.name, told
    return None


def _token(row: torch.Tensor, known: torch.Tensor, norms: torch.Tensor, tolerance: float) -> int:
    gap, token = ((row - known).abs().amax(dim=1) / norms).min(dim=0)
    return int(token) if float(gap) <= 4 * tolerance else -1


def _vocabulary(hf: HFModel, operation: Operation, probes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return projections [tokens, projections] and norms [tokens] of the embedding of each token."""
    values: list[torch.Tensor] = []

    def look(op: Operation, value: torch.Tensor) -> None:
        if op.tap == operation.tap:
            values.append(torch.cat([value.double() @ probes, value.double().norm(dim=1, keepdim=True)], dim=1))
            raise EndOfRun

    for first in range(0, hf.vocab_size, _CHUNK):
        run_hf(hf, torch.arange(first, min(first + _CHUNK, hf.vocab_size))[None], look)
    whole = torch.cat(values)
    return whole[:, :-1], whole[:, -1].clamp_min(1e-30)
