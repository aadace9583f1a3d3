"""A forward in a thread of its own that stays one part of the model ahead of another.

Two forwards of one model, in two dtypes, are compared part by part: the one ahead runs a part and waits, the other runs
the same part. So no more than one part's values are held, and both are whole forwards of HF's code, whatever that does
between the parts. The two never run at the same time.
"""

import threading
from collections.abc import Callable

import torch


class Ahead:
    """Runs a function in a thread, from one call of `wait` in it to the next."""

    def __init__(self, function: Callable[[], None]) -> None:
        """Prepare the thread; `function` must call `wait` at the end of every part."""
        self._function = function
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = self._is_cancelled = False
        self._error: BaseException | None = None
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def advance(self) -> None:
        """Let the thread run until it has finished its next part; raises what it raises."""
        if self._is_over:
            return
        if not self._thread.is_alive():
            self._thread.start()
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Say, from inside of the thread, that a part is finished, and wait for the next."""
        self._done.release()
        self._go.acquire()
        if self._is_cancelled:
            raise _CancelledError

    def finish(self) -> None:
        """Let the thread run to its end."""
        while not self._is_over:
            self.advance()

    def cancel(self) -> None:
        """End the thread where it stands."""
        self._is_cancelled = True
        if self._thread.is_alive():
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        torch.set_num_threads(self._num_threads)  # a thread of its own begins with the default
        try:
            if not self._is_cancelled:
                self._function()
        except _CancelledError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._is_over = True
            self._done.release()


class _CancelledError(BaseException):
    """Ends the thread; no handler of the model's code is to catch it."""
