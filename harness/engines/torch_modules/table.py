"""The table of an engine: which modules show which of HF's values, and how to cut these out of their tensors.

A tap is named by a template: `{layer}` stands for the number of the layer, `{previous}` for the one before it (in layer
0 the tap is left out), `{last}` for the last one.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from harness.errors import Code, HarnessError


class Cut(Protocol):
    """Cuts a value into taps."""

    @property
    def taps(self) -> tuple[str, ...]:
        """Templates of the taps' names."""

    def parts(self, value: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a tap's template and its tensor; `where` names the module in errors."""


Value = str | Cut
"""A tap's template for the tensor as a whole, or how it is cut."""


def taps_of(value: Value) -> tuple[str, ...]:
    """Return the templates of the taps in a value."""
    return (value,) if isinstance(value, str) else value.taps


def parts_of(value: Value, shown: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the taps in what a module was given or gave; of a tuple, without `Fields`, the first: (output, bias)."""
    if isinstance(value, Fields | Attribute):
        yield from value.parts(shown, where)
        return
    tensor = shown[0] if isinstance(shown, tuple | list) and shown else shown
    if not isinstance(tensor, torch.Tensor):
        raise unfit("a value is no tensor", where, "a tensor, or a tuple that begins with one", type(shown).__name__)
    if isinstance(value, str):
        yield value, tensor
    else:
        yield from value.parts(tensor, where)


@dataclass(frozen=True, slots=True)
class Split:
    """Cut along the last dimension: `Split({"...q_proj": 64, "...k_proj": 32, "...v_proj": 32})`."""

    sizes: Mapping[str, int]

    @property
    def taps(self) -> tuple[str, ...]:
        """See `Cut.taps`."""
        return tuple(self.sizes)

    def parts(self, value: torch.Tensor, where: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Cut.parts`."""
        if sum(self.sizes.values()) != value.shape[-1]:
            raise unfit("the sizes of a fused value do not add up", where, value.shape[-1], sum(self.sizes.values()))
        yield from zip(self.sizes, value.split(list(self.sizes.values()), dim=-1), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedHeads:
    """Cut what is packed by KV head: its query heads, its key, its value, then the next KV head's."""

    query: str
    key: str
    value: str
    num_kv_heads: int
    head_dim: int

    @property
    def taps(self) -> tuple[str, ...]:
        """See `Cut.taps`."""
        return self.query, self.key, self.value

    def parts(self, value: torch.Tensor, where: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Cut.parts`."""
        num_heads, left = divmod(value.shape[-1], self.num_kv_heads * self.head_dim)
        if left or num_heads < 3:
            expected = f"a multiple of {self.num_kv_heads} KV heads times {self.head_dim}, three times or more"
            raise unfit("a value packed by KV head has another width", where, expected, value.shape[-1])
        packed = value.unflatten(-1, (self.num_kv_heads, num_heads, self.head_dim))
        query, key, values = packed.split([num_heads - 2, 1, 1], dim=-2)
        yield from ((tap, item.flatten(-3)) for tap, item in zip(self.taps, (query, key, values), strict=True))


class Fields:
    """What a module returns as a tuple: a value for each of its fields, None for one that is not used.

    Where the module returns less, a single tensor for one, the first fields are taken: the first norm of a residual
    stream has none to give.
    """

    def __init__(self, *fields: Value | None) -> None:
        """Give the fields in their order; those after the last are left alone."""
        self._fields = fields

    @property
    def taps(self) -> tuple[str, ...]:
        """See `Cut.taps`."""
        return tuple(tap for field in self._fields if field is not None for tap in taps_of(field))

    def parts(self, value: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Cut.parts`."""
        values = value if isinstance(value, tuple | list) else (value,)
        for cut, item in zip(self._fields, values, strict=False):
            if cut is not None and item is not None:
                yield from parts_of(cut, item, where)


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of what a module returns: of an object that is no tensor; a tensor is the value itself."""

    name: str
    value: Value

    @property
    def taps(self) -> tuple[str, ...]:
        """See `Cut.taps`."""
        return taps_of(self.value)

    def parts(self, value: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Cut.parts`."""
        yield from parts_of(self.value, getattr(value, self.name, value), where)


def unfit(what: str, where: str, expected: object, actual: object) -> HarnessError:
    """Return the error for a table that does not fit the engine."""
    return HarnessError(
        Code.BAD_MODULE_TABLE,
        what,
        where=where,
        expected=str(expected),
        actual=str(actual),
        hint="correct the module's line of the table; docs/check-your-torch-engine.md explains it",
    )


Argument = int | str
"""Place or name of an argument of a module's forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The value of HF's graph that a module shows."""

    module: str
    """Path in the engine, `{layer}` for the number: `model.layers.{layer}.self_attn.qkv_proj`. Where one module serves
    all layers (a rotary embedding, often), its calls in a step are counted."""
    output: Value | None = None
    inputs: Mapping[Argument, Value] = field(default_factory=dict)
    """Arguments as they are before the call."""
    updated: Mapping[Argument, Value] = field(default_factory=dict)
    """Arguments that the call changes in place, as they are after it."""
    token_ids: Argument | None = None
    """Of the embedding: where its token ids are, so that it is seen whether the forced tokens were fed."""
    is_sampled_only: bool = False
    """Whether it computes only the rows that tokens are sampled from."""

    @property
    def values(self) -> tuple[Value, ...]:
        """All values of the line."""
        return (*self.inputs.values(), *self.updated.values(), *(() if self.output is None else (self.output,)))

    @property
    def taps(self) -> tuple[str, ...]:
        """Templates of all taps of the line."""
        return tuple(tap for value in self.values for tap in taps_of(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A module and its line."""

    module: nn.Module
    path: str
    entry: Entry
    layers: tuple[int | None, ...]
    """Layers that it serves, in the order of its calls in a step; None outside of the layers."""


def bind(model: nn.Module, table: Sequence[Entry]) -> tuple[list[Binding], int]:
    """Find the modules of every line; return them and the number of layers.

    Raises:
        HarnessError: BAD_MODULE_TABLE: a line matches no module, two lines one module, or two lines name one tap.
    """
    paths = dict(model.named_modules(remove_duplicate=False))
    paths_of = {entry.module: _matches(entry, paths) for entry in table}
    num_layers = 1 + max((layer for matches in paths_of.values() for layer in matches if layer is not None), default=-1)
    _check_taps(table)
    bindings: dict[int, Binding] = {}
    for entry in table:
        by_module: dict[nn.Module, list[int | None]] = defaultdict(list)
        for layer, path in paths_of[entry.module].items():
            by_module[paths[path]].append(layer)
        for module, layers in by_module.items():
            path = paths_of[entry.module][layers[0]]
            if id(module) in bindings:
                raise unfit("two lines stand for one module", path, "one line", bindings[id(module)].entry.module)
            is_for_all = layers == [None] and any("{layer}" in tap or "{previous}" in tap for tap in entry.taps)
            served = tuple(range(num_layers)) if is_for_all else tuple(layers)
            bindings[id(module)] = Binding(module=module, path=path, entry=entry, layers=served)
    return list(bindings.values()), num_layers


def _matches(entry: Entry, paths: Mapping[str, nn.Module]) -> dict[int | None, str]:
    """Return the path of each layer's module, in the order of the layers."""
    before, is_layered, behind = entry.module.partition("{layer}")
    pattern = re.compile(re.escape(before) + (r"(\d+)" + re.escape(behind) if is_layered else ""), re.ASCII)
    hits = [(match, path) for path in paths if (match := pattern.fullmatch(path))]
    if not hits:
        near = entry.module.rpartition(".")[2]
        there = [path for path in paths if path.rpartition(".")[2] == near][:3]
        actual = ", ".join(there) or f"no module whose name ends in {near}"
        raise unfit("a line matches no module", entry.module, "the path of a module", actual)
    return dict(sorted((int(match[1]) if is_layered else None, path) for match, path in hits))


def _check_taps(table: Sequence[Entry]) -> None:
    owners: dict[str, str] = {}
    for entry in table:
        for tap in entry.taps:
            if tap in owners:
                raise unfit(f"two values have the name {tap}", entry.module, "one value for each tap", owners[tap])
            owners[tap] = entry.module
