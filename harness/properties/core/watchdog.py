"""A limit on the CPU time of one call of the code under test: a call that never returns is a finding, not our hang.

It rests on SIGPROF, which only the main thread gets; elsewhere calls are not limited. An endless loop uses CPU time,
and a busy machine does not change it.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

CALL_LIMIT_S = 10.0
"""CPU seconds for one call while examples are searched."""
SHRINKING_LIMIT_S = 0.25
"""CPU seconds while an example is made smaller: each attempt that does not return takes so long."""
AGAIN_S = 0.1
"""The signal comes again where the code that it interrupts swallows exceptions."""

Result = TypeVar("Result")
_limit_s: float | None = None


class HangError(BaseException):
    """A call did not return in time; not an Exception, so that the code under test does not catch it."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"did not return within {limit_s:g} s of CPU time")


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Limit each call of `call_limited`; the timer and the handler of others are put back at the end."""
    global _limit_s
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    before, _limit_s = _limit_s, limit_s
    timer = signal.setitimer(signal.ITIMER_PROF, 0)
    handler = signal.signal(signal.SIGPROF, _raise_hang)
    try:
        yield
    finally:
        _limit_s = before
        signal.signal(signal.SIGPROF, handler)
        signal.setitimer(signal.ITIMER_PROF, *timer)


def call_limited(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function within the limit.

    Raises:
        HangError: it did not return in time.
    """
    if _limit_s is None:
        return function(*args, **kwargs)
    signal.setitimer(signal.ITIMER_PROF, _limit_s, AGAIN_S)
    try:
        return function(*args, **kwargs)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _raise_hang(_: int, frame: FrameType | None) -> None:
    # An exception in a callback of the garbage collector is lost and reported as a warning; the signal comes again.
    if frame is None or not _is_callback_of_the_collector(frame):
        raise HangError(_limit_s or 0.0)


def _is_callback_of_the_collector(frame: FrameType) -> bool:
    # Hypothesis has one by this name; the standard library's remove what was collected from weak sets and dicts.
    return frame.f_code.co_name == "gc_callback" or frame.f_globals.get("__name__") in ("weakref", "_weakrefset")
