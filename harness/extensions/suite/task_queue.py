"""The tasks of a suite that wait: those that could run, in groups of equal needs, and cases without their golden."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.extensions.suite.task import StoredGolden, SuiteCase, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGroup:
    """Tasks that can run, of one golden and with the same needs; there is at least one."""

    golden: str
    """Its digest."""
    asked: tuple[float, float, float]
    """CPUs, GiB of memory, GPUs."""
    tasks: deque[Task] = field(default_factory=deque)

    @property
    def case(self) -> SuiteCase:
        """The case that has waited longest."""
        return self.tasks[0].case


class TaskGroups:
    """Tasks that can run, in groups in the order in which these were begun."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[object, TaskGroup]] = {}
        """By golden and needs."""

    def __len__(self) -> int:
        """Return how many tasks there are."""
        return sum(len(group.tasks) for group in self)

    def __iter__(self) -> Iterator[TaskGroup]:
        return (group for groups in self._groups.values() for group in groups.values())

    def of(self, golden: str) -> Iterable[TaskGroup]:
        """Return the groups of a golden."""
        return self._groups[golden].values()

    def __contains__(self, golden: str) -> bool:
        """Return whether a golden has tasks that can run."""
        return golden in self._groups

    def add(self, task: Task, golden: str) -> None:
        """Add a task to the end of its group."""
        asked = task.case.resources
        group = TaskGroup(golden=golden, asked=(asked.cpus, asked.memory_gib, asked.gpus))
        self._groups.setdefault(golden, {}).setdefault(_needs(task), group).tasks.append(task)

    def take(self, group: TaskGroup) -> Task:
        """Take the first task of a group out."""
        task = group.tasks.popleft()
        if not group.tasks:
            del self._groups[group.golden][_needs(task)]
        if not self._groups[group.golden]:
            del self._groups[group.golden]
        return task


def _needs(task: Task) -> object:
    asked = task.case.resources
    return task.case.case.engine, task.case.environment, asked.cpus, asked.memory_gib, asked.gpus


class TaskQueue:
    """Cases, each after its golden."""

    def __init__(self, cases: Sequence[Task], goldens: Mapping[str, tuple[StoredGolden, ...]]) -> None:
        """Queue cases that have no result yet; `goldens`: by digest, those that are there already."""
        self.goldens = TaskGroups()
        self.cases = TaskGroups()
        """What can run."""
        self._waiting: dict[str, list[Task]] = {}
        """By digest: cases whose golden is not there yet."""
        digests = [task.case.golden_digest() for task in cases]
        self._forked = {at for at, task in zip(digests, cases, strict=True) if "forked" in task.case.case.schedules}
        """Digests of goldens that the schedule `forked` needs copies for."""
        for digest, task in zip(digests, cases, strict=True):
            stored = goldens.get(digest)
            if stored is None:
                self._waiting.setdefault(digest, []).append(task)
            else:
                self.cases.add(task.model_copy(update={"goldens": stored}), digest)
        for digest, tasks in self._waiting.items():
            self._add_golden(tasks[0], digest)

    def __len__(self) -> int:
        """Return how many tasks can run."""
        return len(self.goldens) + len(self.cases)

    @property
    def num_goldens(self) -> int:
        """Goldens that are to be made, or are being made."""
        return len(self._waiting)

    def groups(self) -> Iterable[TaskGroup]:
        """Return what can run: goldens first, for which others wait, else in the order in which it was queued."""
        return itertools.chain(self.goldens, self.cases)

    def take(self, group: TaskGroup) -> Task:
        """Take the first task of a group out."""
        return (self.goldens if group.tasks[0].kind == "golden" else self.cases).take(group)

    def put_back(self, task: Task, *, needs_golden: bool = False) -> None:
        """Queue a task again; `needs_golden`: its golden is gone, and is made again before it."""
        digest = task.case.golden_digest()
        if not needs_golden:
            (self.goldens if task.kind == "golden" else self.cases).add(task, digest)
            return
        if digest not in self._waiting:
            self._add_golden(task, digest)
        self._waiting.setdefault(digest, []).append(task)

    def release(self, golden: Task, stored: Sequence[StoredGolden]) -> None:
        """Let the cases run whose golden is there."""
        for task in self.drop_waiting(golden):
            self.cases.add(task.model_copy(update={"goldens": stored}), golden.case.golden_digest())

    def drop_waiting(self, golden: Task) -> list[Task]:
        """Take out the cases that wait for a golden."""
        return self._waiting.pop(golden.case.golden_digest())

    def drop_ready(self) -> list[Task]:
        """Take out all that can run."""
        dropped = [task for group in self.groups() for task in group.tasks]
        self.goldens, self.cases = TaskGroups(), TaskGroups()
        return dropped

    def _add_golden(self, task: Task, digest: str) -> None:
        update = {"kind": "golden", "is_forked": digest in self._forked, "goldens": ()}
        self.goldens.add(task.model_copy(update=update), digest)
