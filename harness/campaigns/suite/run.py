"""The driver: hands tasks to a pool, goldens first, until every case has ended in exactly one way."""

import base64
import hashlib
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.base.files import write_text
from harness.campaigns.suite.journal import Journal
from harness.campaigns.suite.pool import Ended, Pool
from harness.campaigns.suite.task import Environment, Loss, SuiteCase, Task, TaskResult
from harness.errors import Code, HarnessError
from harness.report.page.html import REPORT_NAME
from harness.results.suite import CaseResult, CaseVerdict, SuiteResult

MOST_ATTEMPTS = 3
"""Times that a task is tried whose worker or node was lost."""
NO_NODE_PATIENCE_S = 60.0
"""Time for which a suite waits for a machine when no machine is left that can run the rest."""
_WAIT_S = 0.5
_LOOK_AHEAD = 1000
"""Waiting tasks that are looked at for one that fits, each time that something has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Counts of a suite that runs."""

    running: int
    done: int
    failed: int
    """Of those that are done."""
    total: int
    goldens_left: int
    seconds_left: float | None
    """None until a case has ended."""


@dataclass(slots=True, kw_only=True)
class Driver:
    """Runs the cases of a suite on a pool."""

    cases: Sequence[SuiteCase]
    pool: Pool
    journal: Journal
    folder: Path
    """That keeps the cases' own reports."""
    environments: dict[str, Environment] = field(default_factory=dict)
    store: str | None = None
    store_patience_s: float = 60.0
    report: Callable[[Progress], None] = lambda _progress: None
    no_node_patience_s: float = NO_NODE_PATIENCE_S

    _stuck_since: float | None = None
    _ready: deque[Task] = field(default_factory=deque)
    _waiting: dict[str, list[Task]] = field(default_factory=dict)
    """By digest: cases whose golden is not there yet."""
    _forked: set[str] = field(default_factory=set)
    """Digests of goldens that the schedule `forked` needs copies for."""
    _losses: dict[str, list[str]] = field(default_factory=dict)
    """By label of a task: why its attempts came to nothing."""
    _submitted: dict[str, float] = field(default_factory=dict)
    """By label: when a task was handed over last."""
    _done: dict[str, CaseResult] = field(default_factory=dict)
    _num_running: int = 0
    _num_resumed: int = 0
    _goldens: list[float] = field(default_factory=list)
    _begin: float = field(default_factory=time.perf_counter)
    _cases_begin: float | None = None
    """When the first case was handed over: goldens say nothing of how long cases take."""

    def run(self) -> SuiteResult:
        """Run every case that has no result yet, and return the results of all.

        Raises:
            HarnessError: RESOURCES_LACKING, before the first task; CANNOT_WRITE; what the pool raises.
        """
        self._refuse_what_fits_nowhere()
        num_workers = self.pool.num_workers
        self._plan()
        while self._ready or self._num_running:
            self._submit()
            self._give_up_if_stuck()
            for ended in self.pool.wait(_WAIT_S):
                self._num_running -= 1
                self._handle(ended)
            self.journal.sync()  # once for all that ended meanwhile: a slow disk takes milliseconds for it
            self.report(self._progress())
        return SuiteResult(
            cases=tuple(self._done[case.name] for case in self.cases),
            elapsed_s=time.perf_counter() - self._begin,
            num_resumed=self._num_resumed,
            num_goldens=len(self._goldens),
            golden_s=sum(self._goldens),
            num_workers=num_workers,
        )

    def _refuse_what_fits_nowhere(self) -> None:
        for case in self.cases:
            if (has := self.pool.refusal(case)) is not None:
                what = "no machine has the resources that a case asks for"
                hint = "change the rules of the matrix, or add a machine"
                raise HarnessError(
                    Code.RESOURCES_LACKING, what, where=case.name, expected=case.resources, actual=has, hint=hint
                )

    def _plan(self) -> None:
        """Put the goldens that are not there first, and every case after its own."""
        self._forked = {case.golden_digest() for case in self.cases if "forked" in case.case.schedules}
        for case in self.cases:
            known = self.journal.result_of(case)
            if known is not None:
                self._done[case.name] = known
                self._num_resumed += 1
                continue
            self._enqueue(self._task(case))
        self._ready.extend(self._golden_task(tasks[0]) for tasks in self._waiting.values())

    def _golden_task(self, task: Task) -> Task:
        is_forked = task.case.golden_digest() in self._forked
        return task.model_copy(update={"kind": "golden", "is_forked": is_forked, "goldens": ()})

    def _task(self, case: SuiteCase) -> Task:
        return Task(
            kind="case",
            case=case,
            environment=self.environments[case.environment] if case.environment else Environment(),
            store=self.store,
            store_patience_s=self.store_patience_s,
        )

    def _enqueue(self, task: Task) -> None:
        """Put a case to those that can run, or to those that wait for their golden."""
        digest = task.case.golden_digest()
        stored = self.journal.goldens.get(digest)
        if stored is None:
            self._waiting.setdefault(digest, []).append(task)
        else:
            self._ready.append(task.model_copy(update={"goldens": stored}))

    def _submit(self) -> None:
        """Hand over what has room; a task that has none does not hold up others after it."""
        left: deque[Task] = deque()
        full: set[tuple[object, ...]] = set()
        while self._ready and len(left) < _LOOK_AHEAD:
            task = self._ready.popleft()
            needs = (task.case.case.model, task.case.environment, task.case.resources)
            if needs not in full and self.pool.has_room(task):
                self._hand_over(task)
            else:
                full.add(needs)
                left.append(task)
        self._ready.extendleft(reversed(left))

    def _hand_over(self, task: Task) -> None:
        self.pool.submit(task)
        self._submitted[task.label] = time.perf_counter()
        if task.kind == "case" and self._cases_begin is None:
            self._cases_begin = time.perf_counter()
        self._num_running += 1

    def _give_up_if_stuck(self) -> None:
        """End what is left as lost where no machine has come back that could run it."""
        if self._num_running or not self._ready:
            self._stuck_since = None
            return
        self._stuck_since = self._stuck_since or time.monotonic()
        if time.monotonic() - self._stuck_since > self.no_node_patience_s:
            left, self._ready = self._ready, deque()
            for task in left:
                has = self.pool.refusal(task.case) or "nothing is free"
                self._losses.setdefault(task.label, []).append(f"no machine is left that can run it: {has}")
                self._give_up(task, None)

    def _handle(self, ended: Ended) -> None:
        if isinstance(ended.found, Loss):
            self._retry(ended, ended.found)
        elif ended.task.kind == "golden":
            self._release(ended.task, ended.found, ended.node)
        else:
            self._finish(ended.task.case, ended.found, ended.node)

    def _retry(self, ended: Ended, loss: Loss) -> None:
        """Try a task again that was lost, as long as it has attempts left."""
        task, losses = ended.task, self._losses.setdefault(ended.task.label, [])
        losses.append(loss.reason)
        if len(losses) >= MOST_ATTEMPTS:
            self._give_up(task, ended.node)
        elif loss.needs_golden:
            digest = task.case.golden_digest()
            is_being_made = digest in self._waiting
            self._waiting.setdefault(digest, []).append(task)
            if not is_being_made:
                self._ready.appendleft(self._golden_task(task))
        else:
            self._ready.append(task)

    def _give_up(self, task: Task, node: str | None) -> None:
        reasons = self._losses[task.label]
        last = f"{reasons[-1]} ({len(reasons)} attempts)"
        if task.kind == "case":
            self._end(task.case, CaseVerdict.LOST, TaskResult(verdict="error", code=Code.CASE_LOST, reason=last), node)
            return
        for waiting in self._waiting.pop(task.case.golden_digest()):
            lost = TaskResult(verdict="error", code=Code.CASE_LOST, reason=f"its golden was not made: {last}")
            self._end(waiting.case, CaseVerdict.LOST, lost, node)

    def _release(self, task: Task, answer: TaskResult, node: str | None) -> None:
        """Let the cases run whose golden is there; where it cannot be made, they end as it did."""
        waiting = self._waiting.pop(task.case.golden_digest())
        self._goldens.append(answer.seconds)
        if answer.verdict == "error":
            failed = answer.model_copy(update={"reason": f"its golden: {answer.reason}", "seconds": 0.0})
            for each in waiting:
                self._finish(each.case, failed, node)
            return
        self.journal.add_golden(task.case.golden_digest(), answer.goldens, answer.seconds)
        self._ready.extend(each.model_copy(update={"goldens": answer.goldens}) for each in waiting)

    def _finish(self, case: SuiteCase, answer: TaskResult, node: str | None) -> None:
        self._end(case, CaseVerdict(answer.verdict), answer, node)

    def _end(self, case: SuiteCase, verdict: CaseVerdict, answer: TaskResult, node: str | None) -> None:
        """Write down how a case ended; it does so once."""
        assert case.name not in self._done
        losses = tuple(self._losses.get(case.name, ()))
        result = CaseResult(
            name=case.name,
            verdict=verdict,
            labels=case.labels,
            code=answer.code,
            reason=answer.reason,
            first_divergence=answer.first_divergence,
            figures=answer.figures,
            node=node,
            seconds=answer.seconds or None,
            handed_over_s=time.perf_counter() - self._submitted[case.name] if answer.seconds else None,
            attempts=len(losses) + (verdict is not CaseVerdict.LOST),
            losses=losses,
            report=self._keep(case, answer),
        )
        self.journal.add_case(case, result)
        self._done[case.name] = result

    def _keep(self, case: SuiteCase, answer: TaskResult) -> str | None:
        """Write a case's own report; return its place in the suite's folder."""
        place = Path("cases") / case_folder(case.name)
        for name, packed in answer.files.items():
            write_text(self.folder / place / name, zlib.decompress(base64.b64decode(packed)).decode())
        return str(place / REPORT_NAME) if REPORT_NAME in answer.files else None

    def _progress(self) -> Progress:
        ended = len(self._done) - self._num_resumed
        elapsed, left = time.perf_counter() - (self._cases_begin or self._begin), len(self.cases) - len(self._done)
        return Progress(
            running=self._num_running,
            done=len(self._done),
            failed=sum(result.verdict is not CaseVerdict.PASS for result in self._done.values()),
            total=len(self.cases),
            goldens_left=len(self._waiting),
            seconds_left=elapsed / ended * left if ended else None,
        )


def case_folder(name: str) -> str:
    """Return a name for a case's folder: readable, and of that case alone."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
