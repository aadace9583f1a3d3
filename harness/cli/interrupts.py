"""Ctrl-C and SIGTERM end a command wherever Python is when they arrive."""

import signal
import sys
import threading
from types import FrameType

_AGAIN_S = 0.01
"""Time after which an interrupt that was lost comes again."""


class Interrupts:
    """The handler of SIGTERM, which ends a command as Ctrl-C does, and what keeps an interrupt from being lost.

    Python raises KeyboardInterrupt in whatever the main thread runs. A method `__del__` or a callback of C cannot pass
    it on: Python prints it, and goes on as if nobody had pressed Ctrl-C. Such an interrupt is sent once more.
    """

    def __init__(self) -> None:
        self.was_terminated = False
        self._report_unraisable = sys.unraisablehook

    def install(self) -> None:
        """Put both in the place of Python's own, for the rest of the process; called in the main thread."""
        signal.signal(signal.SIGTERM, self._terminate)
        sys.unraisablehook = self._send_again

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        self.was_terminated = True
        raise KeyboardInterrupt

    def _send_again(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._report_unraisable(unraisable)
            return
        number = signal.SIGTERM if self.was_terminated else signal.SIGINT
        # From another thread: sent from here, it would be raised in this method, and be lost again.
        timer = threading.Timer(_AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, number))
        timer.daemon = True
        timer.start()
