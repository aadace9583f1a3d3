"""The values that a tensor was computed from, and the operations: each is noted as it runs.

Every storage that an operation writes is noted with its *sources*, the watched values behind it, and the operations
since. Views share their storage's note. So the graph of a model is what its own forward did, in any architecture.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MOVES = frozenset({
    "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided", "cat", "chunk", "clone", "constant_pad_nd",
    "contiguous", "copy_", "detach", "expand", "fill_", "flatten", "flip", "gather", "index", "index_put",
    "index_put_", "index_select", "lift_fresh", "masked_fill", "movedim", "narrow", "new_empty", "permute", "repeat",
    "repeat_interleave", "reshape", "roll", "scatter", "scatter_", "select", "select_scatter", "set_", "slice",
    "slice_scatter", "split", "split_copy", "split_with_sizes", "split_with_sizes_copy", "squeeze", "stack", "t",
    "transpose", "unbind", "unflatten", "unfold", "unsafe_chunk", "unsafe_split", "unsqueeze", "view", "where",
    "zero_",
})  # fmt: skip
"""Operations that move numbers, or round them to another dtype, and do not compute with them."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a tensor."""

    sources: tuple[str, ...] = ()
    """Watched values behind it, in the order in which they were used."""
    operations: tuple[str, ...] = ()
    """Names of the operations since, each once, but for those that only move numbers."""

    def __or__(self, later: "Origin") -> "Origin":
        return Origin(
            tuple(dict.fromkeys(self.sources + later.sources)), tuple(dict.fromkeys(self.operations + later.operations))
        )


NOWHERE = Origin()


class Flow(TorchDispatchMode):
    """Notes the origin of every tensor that is computed while the mode is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins: dict[int, Origin] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        """Of each storage with a note: its data may be given back, and no other storage gets its address."""
        self._parts: dict[tuple[int, int, int], Origin] = {}
        """Of views that are part of their storage, by where they begin and how many elements they have."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        origin = Origin((), () if name in _MOVES or not inputs else (name,))  # a value without inputs has no origin
        for x in reversed(inputs):
            origin = self.of(x) | origin
        known = {_storage(x) for x in inputs}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (_storage(x) not in known or name.endswith("_")):
                self._note(x, origin)
        return result

    def of(self, tensor: torch.Tensor) -> Origin:
        """Return where a tensor comes from."""
        part = self._parts.get(_place(tensor))
        return self._origins.get(_storage(tensor), NOWHERE) if part is None else part

    def mark(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Set the origin of a tensor, whatever was noted of it before."""
        if tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes():
            self._note(tensor, origin)
        else:
            self._hold(tensor)
            self._parts[_place(tensor)] = origin

    def _note(self, tensor: torch.Tensor, origin: Origin) -> None:
        storage = self._hold(tensor)
        self._origins[storage] = origin
        for place in [place for place in self._parts if place[0] == storage]:
            del self._parts[place]

    def _hold(self, tensor: torch.Tensor) -> int:
        storage = _storage(tensor)
        if storage not in self._storages:
            self._storages[storage] = StorageWeakRef(tensor.untyped_storage())
        return storage


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    return _storage(tensor), int(tensor.storage_offset()), tensor.numel()


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
