"""Pools run tasks: the interface for the driver, and the pool of processes on this machine.

A process serves one task after the other, since importing torch and transformers takes seconds. A task that crashes its
process, hangs or exits ends alone.
"""

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

from harness.base.files import sweep
from harness.engines.process import EngineProcess
from harness.errors import Code, HarnessError
from harness.extensions.suite.preflight import node_name
from harness.extensions.suite.task import GIB, TASK_OUTCOME, Loss, Resources, SuiteCase, Task, TaskOutcome, TaskResult
from harness.extensions.suite.task_queue import TaskQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A task that is no longer running."""

    task: Task
    outcome: TaskOutcome
    node: str | None
    """Name of the machine that it ran on, as far as it is known."""


class Pool(Protocol):
    """Runs tasks."""

    @property
    def num_workers(self) -> int:
        """Tasks of one CPU that can run at once."""

    def refusal(self, case: SuiteCase) -> str | None:
        """Say what there is, where no machine has all that a case asks for; None if one has."""

    def start(self, queue: TaskQueue) -> Task | None:
        """Take a task out of the queue and run it once; None where nothing in the queue has room now."""

    def wait(self, timeout_s: float) -> list[Ended]:
        """Return the tasks that ended since the last call; wait for one, but not longer than that."""

    def close(self) -> None:
        """End what runs, and give everything back."""


START_LIMIT_S = 600.0
"""Longest time for the imports of a new process: a machine that is busy takes a minute."""
_KILLED = re.compile(r"by signal (SIGKILL|SIGTERM|SIGINT|SIGHUP)")
"""Signals that others send: the memory killer, an operator, a machine that shuts down."""


class CaseProcess(EngineProcess):
    """A Python process that does tasks."""

    module = "harness.extensions.suite.worker"

    def __init__(self, setting: "WorkerConfig") -> None:
        """Start a process; see `warm_up`."""
        super().__init__("worker", python=setting.python or sys.executable, variables=dict(setting.variables))

    def warm_up(self) -> None:
        """Import what tasks need.

        Raises:
            HarnessError: CASE_CRASHED or CASE_TIMED_OUT: it does not come up.
        """
        self.ask({}, doing="starting", timeout_s=START_LIMIT_S)

    def end(self) -> None:
        """End the process from another thread than the one that asks it, which then sees that it has ended."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ended(self, doing: str) -> HarnessError:
        error = super()._ended(doing)
        what = error.what.replace("the engine's process", "its interpreter")
        return HarnessError(Code.CASE_CRASHED, what, where=doing, hint="run the case alone: harness check --case FILE")

    def _timed_out(self, doing: str, timeout_s: float | None) -> HarnessError:
        return HarnessError(
            Code.CASE_TIMED_OUT,
            f"it was not done within {timeout_s:g} s, and its process was ended",
            where=doing,
            hint="raise time_limit_s in a rule of the matrix",
        )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The settings that a process is started with; a task with other settings needs another process."""

    python: str | None
    variables: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, task: Task, more: Mapping[str, str]) -> "WorkerConfig":
        """Return the setting of a task: its environment, as many threads as it has CPUs, and `more` variables."""
        threads = str(max(1, int(task.case.resources.cpus)))
        variables = {"OMP_NUM_THREADS": threads, **more, **task.environment.variables}
        return cls(task.environment.python, tuple(sorted(variables.items())))


class ProcessShelf:
    """Processes that wait for a task, and those that have one: together at most so many."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._idle: list[tuple[WorkerConfig, CaseProcess]] = []
        self._busy: list[CaseProcess] = []
        self._lock = Lock()
        self._is_closed = False

    def run(self, task: Task, more: Mapping[str, str]) -> TaskOutcome:
        """Do a task in a process of its setting: one that waits, or a new one."""
        setting = WorkerConfig.of(task, more)
        try:
            process = self._take(setting)
        except (HarnessError, OSError) as error:
            why = error.summary if isinstance(error, HarnessError) else str(error)
            return Loss(reason=f"no process could be started for it: {why}")
        begin = time.perf_counter()
        try:
            message = {"task": task.model_dump(mode="json")}
            said = process.ask(message, doing=task.label, timeout_s=task.case.time_limit_s)
        except HarnessError as error:
            self._give_back(process, None)
            if _KILLED.search(error.what):
                return Loss(reason=error.what)
            seconds = time.perf_counter() - begin
            return TaskResult(verdict="error", code=error.code.value, reason=error.what, seconds=seconds)
        self._give_back(process, setting)
        return TASK_OUTCOME.validate_python(said["found"])

    def close(self) -> None:
        """End all processes; tasks that run are lost."""
        with self._lock:
            self._is_closed = True
            for process in self._busy:
                process.end()
            for _, process in self._idle:
                process.kill()
            self._idle.clear()

    def _take(self, setting: WorkerConfig) -> CaseProcess:
        waiting, surplus = self._waiting(setting)
        if surplus is not None:  # its memory is needed by the process that is started now
            surplus.kill()
        if waiting is not None:
            return waiting
        process = CaseProcess(setting)
        with self._lock:
            self._busy.append(process)
            if self._is_closed:
                process.end()
        try:
            process.warm_up()
        except BaseException:
            self._give_back(process, None)
            raise
        return process

    def _waiting(self, setting: WorkerConfig) -> tuple[CaseProcess | None, CaseProcess | None]:
        """Take a process of that setting from the shelf, or else one that has to make room."""
        with self._lock:
            for at, (idle_setting, process) in enumerate(self._idle):
                if idle_setting == setting and process.is_alive:
                    del self._idle[at]
                    self._busy.append(process)
                    return process, None
            is_full = len(self._idle) + len(self._busy) >= self._size
            return None, self._idle.pop(0)[1] if self._idle and is_full else None

    def _give_back(self, process: CaseProcess, setting: WorkerConfig | None) -> None:
        """Put a process onto the shelf; without a setting it has ended."""
        with self._lock:
            self._busy.remove(process)
            if setting is not None and not self._is_closed:
                self._idle.append((setting, process))
            elif setting is not None:
                process.kill()


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
        self._running: dict[Future[TaskOutcome], tuple[Task, list[int]]] = {}
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

    def start(self, queue: TaskQueue) -> Task | None:
        """See `Pool.start`: in the order of the queue; a task that has no room does not hold up others after it."""
        if len(self._running) >= self._num_workers:
            return None
        fitting = next((group for group in queue.groups() if self._has_room(group.case.resources)), None)
        if fitting is None:
            return None
        task = queue.take(fitting)
        gpus = [self._gpus.pop() for _ in range(_whole(task.case.resources))]
        more = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
        self._running[self._threads.submit(self._shelf.run, task, more)] = (task, gpus)
        return task

    def _has_room(self, asked: Resources) -> bool:
        wanted = [*(running.case.resources for running, _ in self._running.values()), asked]
        total = Resources(
            cpus=sum(item.cpus for item in wanted),
            memory_gib=sum(item.memory_gib for item in wanted),
            gpus=sum(_whole(item) for item in wanted),
        )
        return total.within(self._all)

    def wait(self, timeout_s: float) -> list[Ended]:
        """See `Pool.wait`."""
        done, _ = wait(self._running, timeout=timeout_s, return_when=FIRST_COMPLETED)
        ended = []
        for future in done:
            task, gpus = self._running.pop(future)
            self._gpus += gpus
            ended.append(Ended(task=task, outcome=future.result(), node=node_name()))
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
