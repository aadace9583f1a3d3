"""The KV cache of one sequence, out of the state that llama.cpp saves of it.

The layout is that of `llama_kv_cache::state_write` (src/llama-kv-cache.cpp): streams, cells with their positions, then
the keys of all layers, then the values, whose rows may be transposed.

Heads of a quantised cache are turned before they are stored: a Hadamard matrix spreads what sticks out. See
`attn_rot_k`, `build_input_k_rot` and `build_input_v_rot` in llama.cpp's src/llama-kv-cache.cpp.
"""

import os
import struct
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.engine.options import LlamaCppOptions
from harness.extensions.llamacpp.gguf.header import PLAIN, TYPES
from harness.extensions.llamacpp.gguf.model import gguf_package

_MOST_CELLS = 1 << 28


@dataclass(slots=True)
class CachedRows:
    """The cells of a sequence in the cache."""

    positions: torch.Tensor
    """[cells] int64, ascending."""
    keys: list[torch.Tensor] = field(default_factory=list)
    """[cells, W] of each layer, in the cache's dtype; a quantised cache's in float32."""
    values: list[torch.Tensor] = field(default_factory=list)


def parse_state(state: memoryview) -> CachedRows:
    """Parse the state of one sequence.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: it is laid out in another way.
    """
    reader = _Reader(state)
    rows = _cache(reader)
    if not reader.is_at_end:
        _refuse(f"{len(state)} bytes")
    return rows


@dataclass(frozen=True, slots=True)
class SavedRows:
    """What is saved of a sequence, a layer after the other: of those layers alone that keep it."""

    cache: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values, [positions, W] each; empty where they are laid out in another way (two caches)."""
    states: list[list[torch.Tensor]]
    """State of the convolution and of the recurrence, flat."""


def parse_saved(state: memoryview, *, has_cache: bool, has_states: bool) -> SavedRows:
    """Parse the state of one sequence of any architecture, as far as it is known.

    The layout of states is that of `llama_memory_recurrent::state_write`, after that of a cache where there is one.
    """
    reader = _Reader(state)
    try:
        rows = _cache(reader) if has_cache else None
        states = _states(reader) if has_states else []
    except HarnessError:
        return SavedRows([], [])
    if rows is None or not reader.is_at_end:
        return SavedRows([], states)
    return SavedRows([*zip(rows.keys, rows.values, strict=True)], states)


def _cache(reader: "_Reader") -> CachedRows:
    """Read the one stream of a cache that has cells, in the order of positions."""
    (num_streams,) = reader.numbers("I")
    streams = [rows for _ in range(num_streams) if (rows := _stream(reader)) is not None]
    if len(streams) != 1:
        _refuse(f"{len(streams)} streams")
    (rows,) = streams
    order = rows.positions.argsort()
    return CachedRows(
        positions=rows.positions[order],
        keys=[keys[order] for keys in rows.keys],
        values=[values[order] for values in rows.values],
    )


def _states(reader: "_Reader") -> list[list[torch.Tensor]]:
    """Read the one cell of a sequence: the convolutions of all layers that have one, then the recurrences."""
    (num_cells,) = reader.numbers("I")
    for _ in range(num_cells):
        _position, num_sequences = reader.numbers("iI")
        reader.take(4 * num_sequences)
    reader.numbers("II")
    states = []
    while num_cells == 1 and not reader.is_at_end:
        kind, row_bytes = reader.numbers("iQ")
        row = reader.take(row_bytes)
        states.append(_tensor(row, kind, 1).flatten() if row else torch.empty(0))  # LFM2 has convolutions alone
    half = len(states) // 2
    return [list(item) for item in zip(states[:half], states[half:], strict=True)]


class _Reader:
    """Reads numbers and bytes one after the other."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0
        self.numbers("Ii")  # a magic number and the sequence

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._data)

    def numbers(self, layout: str) -> tuple[int, ...]:
        size = struct.calcsize(f"<{layout}")
        return struct.unpack(f"<{layout}", self.take(size))

    def take(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        if count < 0 or self._at > len(self._data):
            _refuse(f"{count} bytes are wanted at byte {begin} of {len(self._data)}")
        return bytes(self._data[begin : self._at])


def _stream(reader: _Reader) -> CachedRows | None:
    (num_cells,) = reader.numbers("I")
    if num_cells > _MOST_CELLS:
        _refuse(f"{num_cells} cells")
    if not num_cells:
        return None
    positions = []
    for _ in range(num_cells):
        position, num_sequences = reader.numbers("iI")
        reader.take(4 * num_sequences)
        positions.append(position)
    is_transposed, num_layers = reader.numbers("II")
    rows = CachedRows(positions=torch.tensor(positions))
    rows.keys += [_rows(reader, num_cells) for _ in range(num_layers)]
    rows.values += [(_columns if is_transposed else _rows)(reader, num_cells) for _ in range(num_layers)]
    return rows


def _rows(reader: _Reader, num_cells: int) -> torch.Tensor:
    """[cells, W], a row after the other."""
    kind, row_bytes = reader.numbers("iQ")
    return _tensor(reader.take(num_cells * row_bytes), kind, num_cells)


def _columns(reader: _Reader, num_cells: int) -> torch.Tensor:
    """[cells, W], an element of all rows after the other."""
    kind, itemsize, width = reader.numbers("iII")
    return _tensor(reader.take(width * num_cells * itemsize), kind, width).T.contiguous()


def _tensor(data: bytes, kind: int, num_rows: int) -> torch.Tensor:
    name = TYPES[kind].name if kind in TYPES else str(kind)
    values: Any = np.frombuffer(data, dtype=np.uint8).copy()
    if name in PLAIN:
        return torch.from_numpy(values).view(getattr(torch, PLAIN[name])).reshape(num_rows, -1)
    gguf = gguf_package()
    return torch.from_numpy(gguf.quants.dequantize(values.reshape(num_rows, -1), gguf.GGMLQuantizationType(kind)))


def _refuse(actual: str) -> NoReturn:
    raise HarnessError(
        Code.ENGINE_CANNOT_SERVE,
        "this version of llama.cpp saves its cache in another layout",
        where="llama_state_seq_get_data",
        actual=actual,
        hint="install llama-cpp-python 0.3.36",
    )


_LEAST = 64


def rotations(options: LlamaCppOptions, head_dim: int) -> tuple[int, int]:
    """Return the sizes of the matrices that turn parts of keys and of values; 0 for none."""
    if head_dim % _LEAST or os.environ.get("LLAMA_ATTN_ROT_DISABLE", "0") not in ("", "0"):
        return 0, 0
    keys = _LEAST
    while head_dim % (2 * keys) == 0:
        keys *= 2
    sizes = [0 if name in PLAIN else size for name, size in zip(options.cache_names, (keys, _LEAST), strict=True)]
    return sizes[0], sizes[1]


def turned_back(x: torch.Tensor, size: int) -> torch.Tensor:
    """Undo the turn of rows [cells, W]: the fast transform, whose inverse is itself."""
    if not size:
        return x
    parts, width = x.double().unflatten(1, (-1, size)), 1
    while width < size:
        pairs = parts.unflatten(2, (-1, 2, width))
        parts = torch.stack((pairs.sum(3), pairs[..., 0, :] - pairs[..., 1, :]), dim=3).flatten(2)
        width *= 2
    turned: torch.Tensor = (parts / size**0.5).flatten(1)
    return turned.to(x.dtype)
