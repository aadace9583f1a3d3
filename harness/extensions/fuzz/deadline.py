"""A limit on the time of one run of an engine: an engine that hangs is a finding, not our hang.

It is wall time, because an engine that waits for ever uses no CPU time. It rests on SIGALRM, which only the main thread
gets, and which Python handles between its own instructions: code in C that never returns is not interrupted.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 0.1
"""The signal comes again where the code that it interrupts swallows exceptions."""


class DeadlineError(BaseException):
    """The engine did not come to its end in time; not an Exception, so that the engine does not catch it."""


@contextmanager
def deadline(limit_s: float) -> Iterator[None]:
    """Raise DeadlineError in the block after so many seconds; the timer and handler of others are put back.

    Outside of the main thread, and if there is no SIGALRM, nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    handler = signal.signal(signal.SIGALRM, _raise)
    timer = signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def _raise(_: int, frame: FrameType | None) -> None:
    # An exception in Hypothesis' callback of the garbage collector is lost and reported; the signal comes again.
    if frame is None or frame.f_code.co_name != "gc_callback":
        raise DeadlineError
