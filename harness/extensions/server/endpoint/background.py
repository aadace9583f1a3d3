"""The truth in a thread of its own: prompts that are answered are forced while the server works on others."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from harness.base.threads import limit_threads, one_thread
from harness.extensions.server.endpoint.truth import Rows, Walk, walk_truth
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
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="truth")
        self._blocks: list[Future[dict[int, Rows]]] = []
        self._is_cancelled, self._is_alone = threading.Event(), threading.Event()
        self._num_added = 0
        self.seconds = 0.0
        """In forwards, until now."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_cancelled.set()
        self._pool.shutdown(cancel_futures=True)

    def add(self, walks: Mapping[int, Walk]) -> None:
        """Add walks by the number of their prompt; they are run as one batch. Raises what a forward raised before."""
        for block in self._blocks:
            if block.done():
                block.result()
        self._num_added += len(walks)
        self._blocks.append(self._pool.submit(self._run, walks))

    def finish(self, progress: Progress | None = None) -> dict[int, Rows]:
        """Wait for all that was added, and return the rows by prompt and position; raises what a forward raised."""
        self._is_alone.set()
        found: dict[int, Rows] = {}
        for block in self._blocks:
            found |= block.result()
            if progress is not None:
                progress(len(found), self._num_added)
        return found

    def _run(self, walks: Mapping[int, Walk]) -> dict[int, Rows]:
        begin = time.perf_counter()
        try:
            with self._threads():
                rows = walk_truth(self._hf, list(walks.values()), truth=self._truth, check=self._check)
        except _CancelledError:
            return {}
        self.seconds += time.perf_counter() - begin
        return dict(zip(walks, rows, strict=True))

    def _threads(self) -> AbstractContextManager[None]:
        if self._is_server_here and not self._is_alone.is_set():
            return one_thread()
        return limit_threads(int(getattr(self._hf.config, "hidden_size", 0)))

    def _check(self) -> None:
        """End the forward at its next operation when its result is not wanted any more."""
        if self._is_cancelled.is_set():
            raise _CancelledError


class _CancelledError(BaseException):
    """Ends a forward; no handler of the model's code is to catch it."""
