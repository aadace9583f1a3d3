"""Threads: how many torch uses for a model, and workers beside the one that runs a model.

Small matrices are faster on one thread. Results of workers come back in the order in which they were asked for.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch

SMALL_HIDDEN_SIZE = 512
"""Below it a product of a few rows takes microseconds, and waking a second thread takes longer; on a machine that is
busy otherwise, a thousand times longer (measured: 8 ms an operation)."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, and restore the number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def limit_threads(hidden_size: int) -> AbstractContextManager[None]:
    """Use one thread for a small model, and restore the number afterwards; `OMP_NUM_THREADS` takes precedence."""
    is_small = hidden_size < SMALL_HIDDEN_SIZE and "OMP_NUM_THREADS" not in os.environ
    return one_thread() if is_small else nullcontext()


Result = TypeVar("Result")


def num_spare_threads(device: torch.device) -> int:
    """Return how many workers help beside a model that runs on `device`: none beside a single thread.

    Results on another device than the CPU are judged there, in the order of its stream.
    """
    num_threads = torch.get_num_threads()
    return num_threads if device.type == "cpu" and num_threads > 1 else 0


class Workers(Generic[Result]):
    """A pool of threads, in each of which torch uses one thread; without any, the caller does the work.

    Use it as a context manager: leaving the block drops what was not begun, and waits for the rest.
    """

    def __init__(self, num_threads: int = 0) -> None:
        self.num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        if num_threads:
            self._pool = ThreadPoolExecutor(num_threads, "harness-worker", initializer=_prepare_thread)
        self._futures: deque[Future[Result]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def submit(self, function: Callable[[], Result]) -> None:
        """Call the function now or soon; `finished` raises what it raises."""
        if self._pool is not None:
            self._futures.append(self._pool.submit(function))
            return
        done: Future[Result] = Future()
        done.set_result(function())
        self._futures.append(done)

    def finished(self, *, all_but: int = 0) -> Iterator[Result]:
        """Wait for the calls and yield what they returned, the oldest first; the newest `all_but` are left."""
        while len(self._futures) > all_but:
            yield self._futures.popleft().result()


def _prepare_thread() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)  # each thread has a mode of its own
