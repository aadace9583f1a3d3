"""HF's values, cut out of the tensors of an engine's module.

A tap is named by a template: `{layer}` stands for the number of the layer, `{previous}` for the one before it (in layer
0 the tap is left out), `{last}` for the last one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

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


def parts_of(value: Value, given: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the taps in what a module was given or gave; of a tuple, without `Fields`, the first: (output, bias)."""
    if isinstance(value, Fields | Attribute):
        yield from value.parts(given, where)
        return
    tensor = given[0] if isinstance(given, tuple | list) and given else given
    if not isinstance(tensor, torch.Tensor):
        raise unfit("a value is no tensor", where, "a tensor, or a tuple that begins with one", type(given).__name__)
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
        given = value if isinstance(value, tuple | list) else (value,)
        for field, item in zip(self._fields, given, strict=False):
            if field is not None and item is not None:
                yield from parts_of(field, item, where)


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
