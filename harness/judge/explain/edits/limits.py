"""Limits of a trial: a changed program may compute far more than the right one, or without an end."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

from harness.judge.explain.core.rerun import Budget

_MORE, _SPARE_BYTES = 16, 1 << 28
"""Times the bytes that the right program makes, and bytes beyond them, that a trial may make."""
_LONGER, _SPARE_SECONDS = 20, 0.1
"""The same of the time that it takes."""
_SECONDS_OF_ELEMENT = 1e-8
"""What a function of torch takes for an element of its largest tensor in float64, on one thread: products of 20 rows
5e-9, conversions 6e-9 to 1.3e-8, squares 1.5e-8 (AMD EPYC, a load of 5)."""
_FACTORIES = {torch.zeros, torch.ones, torch.full, torch.empty, torch.arange}
_GROWING = {
    *_FACTORIES, torch.Tensor.repeat, torch.Tensor.repeat_interleave, torch.repeat_interleave, torch.Tensor.tile,
    torch.tile,
}  # fmt: skip
"""Functions whose result may be large though no tensor that they are given is."""


class TooMuchError(BaseException):
    """Ends a trial; no handler in the changed program is to catch it."""


class Meter(TorchFunctionMode):
    """Adds up what the functions of a program make, and ends the program beyond its limits.

    A function whose result may be too large is called on shapes alone first, once for the same shapes. The time is
    looked at in every function of torch.
    """

    def __init__(
        self, *, max_bytes: float = float("inf"), max_seconds: float = float("inf"), small: set[Any] | None = None
    ) -> None:
        super().__init__()
        self.num_bytes, self.taken = 0, 0.0
        self.small = set[Any]() if small is None else small
        """Functions with the shapes of tensors of which they make little."""
        self._max_bytes, self._begin, self._max_seconds = max_bytes, time.thread_time(), max_seconds

    def __exit__(self, *error: Any) -> None:
        self.taken = time.thread_time() - self._begin
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if time.thread_time() - self._begin > self._max_seconds:
            raise TooMuchError
        if func is scaled_dot_product_attention and any(item.numel() == 0 for item in args[:3]):
            raise ValueError("without any key head, torch divides by zero and ends the process")
        if self._may_be_large(func, args):
            call = func, tuple(item.shape if isinstance(item, torch.Tensor) else None for item in args)
            if func in _GROWING or call not in self.small:
                with torch._C.DisableTorchFunction():
                    self._count(_on_shapes(func, args, kwargs or {}), is_kept=False)
                self.small.add(call)
        result = func(*args, **(kwargs or {}))
        self._count(result)
        return result

    def _may_be_large(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        if func in _GROWING:
            return self._max_bytes < float("inf")
        largest, second = 0, 0
        for item in args:
            if isinstance(item, torch.Tensor):
                second, largest = sorted((second, largest, item.numel()))[1:]
        return 8 * largest * second > self._max_bytes

    def _count(self, result: Any, *, is_kept: bool = True) -> None:
        if isinstance(result, torch.Tensor):
            made = result.nbytes
        elif isinstance(result, bool | int | float | None):
            return
        else:
            made = sum(item.nbytes for item in tree_iter(result) if isinstance(item, torch.Tensor))
        if self.num_bytes + made > self._max_bytes:
            raise TooMuchError
        self.num_bytes += made if is_kept else 0


class OutOfTimeError(BaseException):
    """Ends what is computed; no handler in it is to catch this."""


class _Deadline(TorchFunctionMode):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = time.perf_counter() + seconds

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_computed = getattr(func, "__name__", "") != "__get__"
        largest = max((item.numel() for item in args if isinstance(item, torch.Tensor)), default=0) * is_computed
        if time.perf_counter() + _SECONDS_OF_ELEMENT * largest > self._end:
            self._end = math.inf  # what the block has changed is put back by functions of torch
            raise OutOfTimeError
        return func(*args, **(kwargs or {}))


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End the block in the first function of torch that would take longer than so many seconds, all together.

    What ends it is an OutOfTimeError.
    """
    with suppress(OutOfTimeError), _Deadline(seconds):
        yield


def _on_shapes(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return what a function gives on tensors without storage; None if it needs their values."""
    shapes = tree_map(lambda item: item.to("meta") if isinstance(item, torch.Tensor) else item, (args, kwargs))
    place = {"device": "meta"} if func in _FACTORIES else {}
    try:
        return func(*shapes[0], **{**shapes[1], **place})
    except Exception:
        return None


def limited(right: Meter, budget: Budget | None = None) -> Meter:
    """Return a meter with the limits of a trial, by what the right program took and by the time that is left."""
    max_bytes, max_seconds = _MORE * right.num_bytes + _SPARE_BYTES, _LONGER * right.taken + _SPARE_SECONDS
    if budget is not None:
        max_seconds = min(max_seconds, budget.left)
    return Meter(max_bytes=max_bytes, max_seconds=max_seconds, small=right.small)
