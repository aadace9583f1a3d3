"""Shapes and dtypes, looked at before any value."""

from collections.abc import Sequence

import torch

from harness.errors import Code
from harness.metrics import rounding_unit
from harness.recording import Recording, TapEntry
from harness.recording.tensors import TORCH_DTYPES
from harness.results import Finding
from harness.taps import DecoderGraph


def check_taps(actual: Recording, expected: Recording) -> tuple[list[Finding], set[str]]:
    """Compare the taps' shapes and dtypes; return what is wrong, and the names of the taps that can be used."""
    shapes = {entry.name: entry.shape for entry in expected.manifest.taps}
    findings, usable = [], set[str]()
    for entry in actual.manifest.taps:
        message = _mismatch(entry, shapes.get(entry.name), actual.manifest.dtype)
        if message is None:
            usable.add(entry.name)
        else:
            findings.append(Finding(code=Code.TAP_MISMATCH, message=message, tap=entry.name))
    return findings, usable


def usable_graph(graph: DecoderGraph, usable: set[str]) -> DecoderGraph:
    """Return the operations whose output and inputs all have the shape and dtype they must have."""
    return DecoderGraph(tuple(op for op in graph if {op.tap, *op.inputs} <= usable))


def _mismatch(entry: TapEntry, shape: Sequence[int] | None, engine_dtype: str) -> str | None:
    dtype = TORCH_DTYPES[entry.dtype]
    if not dtype.is_floating_point:
        return f"dtype of {entry.name} is {entry.dtype}, expected a floating-point dtype"
    # A finer dtype is welcome (logits in float32); a coarser one has lost what was to be judged.
    if rounding_unit(dtype) > rounding_unit(getattr(torch, engine_dtype)) * 1.001:
        return f"dtype of {entry.name} is {entry.dtype}, coarser than the engine's {engine_dtype}"
    if shape is not None and torch.Size(shape).numel() != torch.Size(entry.shape).numel():
        return f"shape of {entry.name} differs: expected {list(shape)}, actual {list(entry.shape)} per row"
    return None
