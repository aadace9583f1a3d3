"""Handlers for the signals that end a command."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from harness.errors import ExitStatus

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as in shells."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command after cleaning up. SIGQUIT stays as it is, for a process that hangs."""
_AGAIN_S = 0.01
"""Delay in seconds before a lost interrupt is sent again."""
_SAME_S = 1.0
"""Seconds in which a second signal counts as the first: a process group got it, and the parent forwarded it."""


class Interrupts:
    """Handles the signals that end a command, and sends a lost interrupt again.

    Python raises KeyboardInterrupt in the code that the main thread runs. A method `__del__` or a callback of C cannot
    propagate it: Python prints it and continues. The handler sends such an interrupt again.
    """

    def __init__(self) -> None:
        self._number: signal.Signals | None = None
        """The first signal."""
        self._last_s = 0.0
        self._was_raised = threading.Event()
        self._report_unraisable = sys.unraisablehook

    def install(self) -> None:
        """Replace Python's signal handlers and its hook for unraisable exceptions; call it in the main thread.

        A signal that the process ignores already (`nohup`, `command &`) stays ignored.
        """
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._interrupt)
        sys.unraisablehook = self._send_again

    def listen(self, command: Callable[[], int]) -> int:
        """Run a command, which returns INTERRUPTED after an interrupt, and return its exit status.

        The signals are blocked afterwards. After a signal, the status is not that of a pass, because the result may be
        incomplete. Nor is it that of an error, because C code may turn the interrupt into another exception.
        """
        status = INTERRUPTED
        with suppress(KeyboardInterrupt):
            self.install()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_SIGNALS, signal.SIGQUIT})
            status = command()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        is_no_verdict = status in (INTERRUPTED, ExitStatus.PASS, ExitStatus.BAD_INPUT, ExitStatus.INTERNAL)
        return 128 + self._number if is_no_verdict and self._number is not None else status

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._number is not None and now - self._last_s < _SAME_S:
            return
        while frame is not None:
            if frame.f_code is Interrupts._send_again.__code__:
                return  # Python drops what is raised there, and tells nobody; the signal comes again
            frame = frame.f_back
        self._number, self._last_s = self._number or signal.Signals(number), now
        self._was_raised.set()
        raise KeyboardInterrupt

    def _send_again(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._report_unraisable(unraisable)
            return
        self._last_s = 0.0
        self._was_raised.clear()
        number = self._number or signal.SIGINT
        threading.Thread(target=self._send_until_raised, args=(number,), daemon=True).start()

    def _send_until_raised(self, number: int) -> None:
        """Send a signal from another thread: sent in the hook itself, it would be lost again."""
        while not self._was_raised.wait(_AGAIN_S):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
