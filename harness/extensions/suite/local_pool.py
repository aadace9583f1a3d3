"""Tasks in processes on this machine: as many at once as fit into its CPUs, memory and GPUs."""

import os
import tempfile
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from harness.base.files import sweep
from harness.errors import Code, HarnessError
from harness.extensions.suite.fingerprint import node_name
from harness.extensions.suite.pool import Ended
from harness.extensions.suite.process import ProcessShelf
from harness.extensions.suite.task import GIB, Found, Resources, SuiteCase, Task


class LocalPool:
    """Worker processes of this machine."""

    def __init__(self, num_workers: int, *, num_gpus: int = 0) -> None:
        """Use at most so many processes.

        Tasks together have as many CPUs, and never fewer than the machine has.
        """
        if num_workers < 1:
            raise HarnessError(Code.BAD_OPTION, "there must be a process", where="--jobs", actual=num_workers)
        self._num_workers = num_workers
        cpus, memory = os.cpu_count() or 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._all = Resources(cpus=float(max(num_workers, cpus)), memory_gib=memory / GIB, gpus=float(num_gpus))
        self._running: dict[Future[Found], tuple[Task, list[int]]] = {}
        self._gpus = list(range(num_gpus))
        self._shelf = ProcessShelf(num_workers)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="suite")

    @property
    def num_workers(self) -> int:
        """See `Pool.num_workers`."""
        return self._num_workers

    def refusal(self, case: SuiteCase) -> str | None:
        """See `Pool.refusal`."""
        return None if case.resources.within(self._all) else f"this machine has {self._all}"

    def has_room(self, task: Task) -> bool:
        """See `Pool.has_room`."""
        used = [running.case.resources for running, _ in self._running.values()]
        wanted = [*used, task.case.resources]
        total = Resources(
            cpus=sum(item.cpus for item in wanted),
            memory_gib=sum(item.memory_gib for item in wanted),
            gpus=sum(_whole(item) for item in wanted),
        )
        return len(used) < self._num_workers and total.within(self._all)

    def submit(self, task: Task) -> None:
        """See `Pool.submit`."""
        own = [self._gpus.pop() for _ in range(_whole(task.case.resources))]
        more = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))} if own else {}
        self._running[self._threads.submit(self._shelf.run, task, more)] = (task, own)

    def wait(self, timeout_s: float) -> list[Ended]:
        """See `Pool.wait`."""
        done, _ = wait(self._running, timeout=timeout_s, return_when=FIRST_COMPLETED)
        ended = []
        for future in done:
            task, gpus = self._running.pop(future)
            self._gpus += gpus
            ended.append(Ended(task=task, found=future.result(), node=node_name()))
        return ended

    def close(self) -> None:
        """See `Pool.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._shelf.close()
        self._threads.shutdown()
        sweep(Path(tempfile.gettempdir()), "harness-")  # what tasks that were ended had made


def _whole(resources: Resources) -> int:
    """Return how many GPUs are reserved: a part of one is one."""
    return -int(-resources.gpus // 1)
