"""Memory that no live row may depend on, filled with values that show whether one does.

An engine is given a `Poison` with its workload, and calls it before each step. The object that holds its memory has the
methods `fill_unused` and `fill_states`, or one of them; where the engine has the tensor at hand, `fill_rows` fills rows
of padding.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.results.check import Memory

VALUES = {"nan": math.nan, "inf": math.inf, "1e+30": 1e30}
"""NaN and infinity also show what is multiplied by zero; a large number shows what NaN does not, such as a maximum."""
_ALLOCATIONS = ("aten.empty", "aten.new_empty")


@runtime_checkable
class FillsUnused(Protocol):
    """Holds a cache with places that no request has."""

    def fill_unused(self, value: float) -> int:
        """Fill all that holds nothing of any request; return the number of elements."""


@runtime_checkable
class FillsStates(Protocol):
    """Holds what requests keep."""

    def fill_states(self, request: int, value: float) -> int:
        """Fill what a request keeps and shares with no other; return the number of elements."""


@dataclass(slots=True, kw_only=True)
class Poison:
    """One value for one kind of memory, during one run."""

    memory: Memory
    value: float
    victim: int | None = None
    """The request whose states are filled, where the memory is another request's."""
    num_filled: int = 0
    """Elements so far."""

    def before_step(self, holder: object, victim: int | None) -> None:
        """Fill what a step must not read; `victim` is the holder's own number of the request, None if it has none."""
        if self.memory is Memory.UNUSED and isinstance(holder, FillsUnused):
            self.num_filled += holder.fill_unused(self.value)
        if self.memory is Memory.OTHERS and victim is not None and isinstance(holder, FillsStates):
            self.num_filled += holder.fill_states(victim, self.value)

    def fill_rows(self, rows: torch.Tensor, is_live: torch.Tensor) -> None:
        """Fill rows of padding in place: `rows` is a view [rows, any], `is_live` bool [rows]."""
        if self.memory is Memory.PADDING and rows.is_floating_point():
            rows[~is_live] = in_range(self.value, rows.dtype)
            self.num_filled += int((~is_live).sum()) * rows[:1].numel()


def in_range(value: float, dtype: torch.dtype) -> float:
    """Return the value, or the largest of the dtype if that is less: 1e30 is no float16."""
    return min(value, torch.finfo(dtype).max) if math.isfinite(value) else value


def fill(tensor: torch.Tensor, value: float) -> int:
    """Fill a tensor of floating point in place, a view of the memory; return the number of elements."""
    if not tensor.is_floating_point():
        return 0
    tensor.fill_(in_range(value, tensor.dtype))
    return tensor.numel()


@contextmanager
def scratch_filled(poison: Poison | None) -> Iterator[None]:
    """Fill what torch allocates in the block without setting it: with the poison if it is for that, else with zeros.

    Zeros make two runs alike that read what they have not set. Memory that operators allocate inside of themselves, and
    that of other threads and processes, is not seen.
    """
    with _Allocations(poison if poison is not None and poison.memory is Memory.SCRATCH else None):
        yield


class _Allocations(TorchDispatchMode):
    def __init__(self, poison: Poison | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._poison = poison

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(_ALLOCATIONS) and isinstance(result, torch.Tensor) and not result.is_meta:
            num_filled = fill(result, 0.0 if self._poison is None else self._poison.value)
            if self._poison is not None:
                self._poison.num_filled += num_filled
        return result
