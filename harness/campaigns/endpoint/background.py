"""The truth in a thread of its own: prompts that are answered are forced while the server works on others."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from harness.base.threads import limit_threads, one_thread
from harness.campaigns.endpoint.truth import Rows, Walk, walk_truth
from harness.oracle.model import HFModel

Progress = Callable[[int, int], None]


class BackgroundTruth:
    """Runs truth and control along walks in the order in which they are added. Use it as a context manager."""

    def __init__(self, hf: HFModel, *, truth: str, is_server_here: bool) -> None:
        """Prepare the thread.

        Args:
            hf: the model in the server's dtype.
            truth: `float64`, `float32` or `auto`.
            is_server_here: whether the server may want this machine's cores: the forwards get one of them then, until
                the server is done.
        """
        self._hf, self._truth, self._is_server_here = hf, truth, is_server_here
        self._added: queue.SimpleQueue[Mapping[int, Walk] | None] = queue.SimpleQueue()
        self._found: dict[int, Rows] = {}
        self._error: BaseException | None = None
        self._is_cancelled, self._is_alone = threading.Event(), threading.Event()
        self._progress: Progress | None = None
        self._num_added = 0
        self._thread = threading.Thread(target=self._run, name="truth", daemon=True)
        self.seconds = 0.0
        """In forwards, until now."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_cancelled.set()
        self._added.put(None)
        self._thread.join()

    def add(self, walks: Mapping[int, Walk]) -> None:
        """Add walks by the number of their prompt; they are run as one batch. Raises what a forward raised before."""
        if self._error is not None:
            raise self._error
        self._num_added += len(walks)
        self._added.put(walks)

    def finish(self, progress: Progress | None = None) -> dict[int, Rows]:
        """Wait for all that was added, and return the rows by prompt and position; raises what a forward raised."""
        self._progress = progress
        self._is_alone.set()
        self._added.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def _run(self) -> None:
        try:
            while (walks := self._added.get()) is not None:
                begin = time.perf_counter()
                with self._threads():
                    rows = walk_truth(self._hf, list(walks.values()), truth=self._truth, check=self._check)
                self._found.update(zip(walks, rows, strict=True))
                self.seconds += time.perf_counter() - begin
                if self._progress is not None:
                    self._progress(len(self._found), self._num_added)
        except _CancelledError:
            pass
        except BaseException as error:
            self._error = error

    def _threads(self) -> AbstractContextManager[None]:
        if self._is_server_here and not self._is_alone.is_set():
            return one_thread()
        return limit_threads(int(getattr(self._hf.config, "hidden_size", 0)))

    def _check(self) -> None:
        """End the forward at its next operation when its result is not wanted any more."""
        if self._is_cancelled.is_set():
            raise _CancelledError


class _CancelledError(BaseException):
    """Ends the thread; no handler of the model's code is to catch it."""
