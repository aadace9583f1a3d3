"""The tasks of a suite that are left: those that can run, and cases that wait for their golden."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from harness.extensions.suite.task import StoredGolden, Task

_LOOK_AHEAD = 1000
"""Ready tasks that are looked at for one that has room, each time that something has ended."""


class TaskQueue:
    """Cases, each after its golden."""

    def __init__(self, cases: Sequence[Task], goldens: Mapping[str, tuple[StoredGolden, ...]]) -> None:
        """Queue cases that have no result yet; `goldens`: by digest, those that are there already."""
        self._ready: deque[Task] = deque()
        self._waiting: dict[str, list[Task]] = {}
        """By digest: cases whose golden is not there yet."""
        self._forked = {task.case.golden_digest() for task in cases if "forked" in task.case.case.schedules}
        """Digests of goldens that the schedule `forked` needs copies for."""
        for task in cases:
            stored = goldens.get(task.case.golden_digest())
            if stored is None:
                self._waiting.setdefault(task.case.golden_digest(), []).append(task)
            else:
                self._ready.append(task.model_copy(update={"goldens": stored}))
        self._ready.extend(self._golden_task(tasks[0]) for tasks in self._waiting.values())

    def __len__(self) -> int:
        """Return how many tasks can run."""
        return len(self._ready)

    @property
    def num_goldens(self) -> int:
        """Goldens that are to be made, or are being made."""
        return len(self._waiting)

    def take(self, has_room: Callable[[Task], bool]) -> Iterator[Task]:
        """Take out what has room; a task that has none does not hold up others after it."""
        left: deque[Task] = deque()
        full: set[tuple[object, ...]] = set()
        while self._ready and len(left) < _LOOK_AHEAD:
            task = self._ready.popleft()
            needs = (task.case.case.model, task.case.environment, task.case.resources)
            if needs not in full and has_room(task):
                yield task
            else:
                full.add(needs)
                left.append(task)
        self._ready.extendleft(reversed(left))

    def put_back(self, task: Task, *, needs_golden: bool = False) -> None:
        """Queue a task again; `needs_golden`: its golden is gone, and is made again before it."""
        if not needs_golden:
            self._ready.append(task)
            return
        digest = task.case.golden_digest()
        if digest not in self._waiting:
            self._ready.appendleft(self._golden_task(task))
        self._waiting.setdefault(digest, []).append(task)

    def release(self, golden: Task, stored: Sequence[StoredGolden]) -> None:
        """Let the cases run whose golden is there."""
        self._ready.extend(task.model_copy(update={"goldens": stored}) for task in self.drop_waiting(golden))

    def drop_waiting(self, golden: Task) -> list[Task]:
        """Take out the cases that wait for a golden."""
        return self._waiting.pop(golden.case.golden_digest())

    def drop_ready(self) -> list[Task]:
        """Take out all that can run."""
        dropped = list(self._ready)
        self._ready.clear()
        return dropped

    def _golden_task(self, task: Task) -> Task:
        is_forked = task.case.golden_digest() in self._forked
        return task.model_copy(update={"kind": "golden", "is_forked": is_forked, "goldens": ()})
