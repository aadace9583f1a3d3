"""What writer and reader share: names that the format fixes, what a run says of itself, and which rows there may be.

What is imported here must install into any engine's environment: numpy, and neither torch nor pydantic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.base.numerics import Numerics

if TYPE_CHECKING:
    from harness.formats.recording.manifest import ModelInfo, Producer, RequestInfo, Scalar, Shard


SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
PHASES = ("prefill", "decode", "mixed", "readback")
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
}  # fmt: skip
"""Safetensors names of the dtypes that a recording holds, by the names that torch and numpy give them."""


def dtype_name(tensor: Any) -> str | None:
    """Return the safetensors name of a tensor's dtype; None if no recording holds it."""
    return DTYPES.get(str(tensor.dtype).removeprefix("torch."))


def as_bytes(tensor: Any) -> memoryview:
    """Return the bytes of a tensor, torch's or numpy's, in row-major order; copied only where it must be."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    import torch  # it is there: the tensor is one of its own

    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    data: memoryview = flat.numpy().data
    return data


class RequestLengths:
    """The number of tokens of each request, for checks of whole columns of rows: arrays, or tensors on the CPU."""

    def __init__(self, requests: Iterable[RequestInfo]) -> None:
        counts = sorted((request.id, len(request.token_ids)) for request in requests)
        self._ids = np.array([identity for identity, _ in counts])
        self._counts = np.array([count for _, count in counts])

    def first_unknown(self, request: Any) -> int | None:
        """Return the index of the first request id that the recording does not list."""
        return _first(self._ids[self._places(request)] != np.asarray(request))

    def first_outside(self, request: Any, position: Any) -> int | None:
        """Return the index of the first row whose position is not one of its (known) request's tokens."""
        positions = np.asarray(position)
        return _first((positions < 0) | (positions >= self.of(request)))

    def of(self, request: Any) -> Any:
        """Return the number of tokens of each (known) request."""
        return self._counts[self._places(request)]

    def _places(self, request: Any) -> Any:
        return np.searchsorted(self._ids, np.asarray(request)).clip(max=len(self._ids) - 1)


def first_invalid_index(indices: Any, num_rows: int) -> int | None:
    """Return the place of the first entry that is no index into `num_rows` rows, or that repeats an earlier one."""
    values = np.asarray(indices)
    outside = _first((values < 0) | (values >= num_rows))
    if outside is not None:
        return outside
    order = np.argsort(values, kind="stable")
    repeats = np.diff(values[order]) == 0
    return int(order[1:][repeats].min()) if repeats.any() else None


def _first(mask: Any) -> int | None:
    return int(mask.argmax()) if mask.any() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Who ran which model, where and how: the fields of the manifest of the same names."""

    producer: Producer
    model: ModelInfo
    dtype: str
    device: str
    environment: Mapping[str, Scalar] = field(default_factory=dict)
    schedule: str | None = None
    numerics: Numerics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The part of a sharded engine that a recording is of: the whole, if nothing is said."""

    rank: int = 0
    world_size: int = 1
    shards: Mapping[str, Shard] = field(default_factory=dict)
    """By tap, the way in which the ranks' parts make up the whole."""
