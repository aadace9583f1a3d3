"""The driver hands tasks to a pool, goldens first, until every case has ended in exactly one way.

Goldens wait for nothing, cases wait for their golden.
"""

import time
from collections.abc import Sequence

from harness.base.progress import Progress, no_progress
from harness.errors import Code, HarnessError
from harness.extensions.suite.journal import Ledger
from harness.extensions.suite.pool import Ended, Pool
from harness.extensions.suite.result import CaseVerdict, SuiteResult
from harness.extensions.suite.task import Loss, SuiteCase, Task, TaskResult
from harness.extensions.suite.task_queue import TaskQueue

MOST_ATTEMPTS = 3
"""Times that a task is tried whose worker or node was lost."""
NO_NODE_PATIENCE_S = 60.0
"""Time for which a suite waits for a machine when no machine is left that can run the rest."""
_WAIT_S = 0.5


class Driver:
    """Runs the cases of a suite on a pool.

    `progress` is told whenever something has ended; cases of an earlier run do not count. `no_node_patience_s` is how
    long to wait for a machine when none is left that can run the rest.
    """

    def __init__(
        self,
        cases: Sequence[Task],
        pool: Pool,
        ledger: Ledger,
        *,
        progress: Progress = no_progress,
        no_node_patience_s: float = NO_NODE_PATIENCE_S,
    ) -> None:
        self._cases, self._pool, self._ledger = cases, pool, ledger
        self._progress, self._patience_s = progress, no_node_patience_s
        self._begin = time.perf_counter()
        self._submitted: dict[str, float] = {}
        """By label: when a task was handed over last."""
        self._losses: dict[str, list[str]] = {}
        """By label of a task: why its attempts came to nothing."""
        self._golden_s: list[float] = []
        self._num_running = 0
        self._work = "goldens"
        """Until the first case is handed over: goldens say nothing of how long cases take."""

    def run(self) -> SuiteResult:
        """Run every case that has no result yet, and return the results of all.

        Raises:
            HarnessError: RESOURCES_LACKING, before the first task; CANNOT_WRITE; what the pool raises.
        """
        self._refuse_what_fits_nowhere()
        num_workers, last_run = self._pool.num_workers, time.monotonic()
        left = [task for task in self._cases if not self._ledger.resume(task.case)]
        self._queue = TaskQueue(left, self._ledger.journal.goldens)
        while self._queue or self._num_running:
            while (task := self._pool.start(self._queue)) is not None:
                self._note_start(task)
            if self._num_running:
                last_run = time.monotonic()
            elif time.monotonic() - last_run > self._patience_s:
                self._give_up_all()
            for ended in self._pool.wait(_WAIT_S):
                self._num_running -= 1
                self._handle(ended)
            self._ledger.journal.sync()  # once for all that ended meanwhile: a slow disk takes milliseconds for it
            self._tell_progress()
        return SuiteResult(
            cases=tuple(self._ledger.results[task.case.name] for task in self._cases),
            elapsed_s=time.perf_counter() - self._begin,
            num_resumed=self._ledger.num_resumed,
            num_goldens=len(self._golden_s),
            golden_s=sum(self._golden_s),
            num_workers=num_workers,
        )

    def _refuse_what_fits_nowhere(self) -> None:
        for case in (task.case for task in self._cases):
            if (has := self._pool.refusal(case)) is not None:
                what = "no machine has the resources that a case asks for"
                hint = "change the rules of the matrix, or add a machine"
                raise HarnessError(
                    Code.RESOURCES_LACKING, what, where=case.name, expected=case.resources, actual=has, hint=hint
                )

    def _note_start(self, task: Task) -> None:
        self._submitted[task.label] = time.perf_counter()
        if task.kind == "case":
            self._work = "cases"
        self._num_running += 1

    def _give_up_all(self) -> None:
        """End what is left as lost: no machine has come back that could run it."""
        for task in self._queue.drop_ready():
            has = self._pool.refusal(task.case) or "nothing is free"
            self._losses.setdefault(task.label, []).append(f"no machine is left that can run it: {has}")
            self._give_up(task, None)

    def _handle(self, ended: Ended) -> None:
        if isinstance(ended.outcome, Loss):
            self._retry(ended, ended.outcome)
        elif ended.task.kind == "golden":
            self._release(ended.task, ended.outcome, ended.node)
        else:
            self._end(ended.task.case, CaseVerdict(ended.outcome.verdict), ended.outcome, ended.node)

    def _retry(self, ended: Ended, loss: Loss) -> None:
        """Try a task again that was lost, as long as it has attempts left."""
        losses = self._losses.setdefault(ended.task.label, [])
        losses.append(loss.reason)
        if len(losses) >= MOST_ATTEMPTS:
            self._give_up(ended.task, ended.node)
        else:
            self._queue.put_back(ended.task, needs_golden=loss.needs_golden)

    def _give_up(self, task: Task, node: str | None) -> None:
        reasons = self._losses[task.label]
        reason, cases = f"{reasons[-1]} ({len(reasons)} attempts)", [task]
        if task.kind == "golden":
            reason, cases = f"its golden was not made: {reason}", self._queue.drop_waiting(task)
        for lost in cases:
            answer = TaskResult(verdict="error", code=Code.CASE_LOST, reason=reason)
            self._end(lost.case, CaseVerdict.LOST, answer, node)

    def _release(self, golden: Task, answer: TaskResult, node: str | None) -> None:
        """Let the cases run whose golden is there; where it cannot be made, they end as it did."""
        self._golden_s.append(answer.seconds)
        if answer.verdict == "error":
            failed = answer.model_copy(update={"reason": f"its golden: {answer.reason}", "seconds": 0.0})
            for task in self._queue.drop_waiting(golden):
                self._end(task.case, CaseVerdict.ERROR, failed, node)
            return
        self._ledger.journal.add_golden(golden.case.golden_digest(), answer.goldens, answer.seconds)
        self._queue.release(golden, answer.goldens)

    def _end(self, case: SuiteCase, verdict: CaseVerdict, answer: TaskResult, node: str | None) -> None:
        begin = self._submitted.get(case.name)
        handed_over_s = None if begin is None else time.perf_counter() - begin
        losses = tuple(self._losses.get(case.name, ()))
        self._ledger.end(case, verdict, answer, node=node, losses=losses, handed_over_s=handed_over_s)

    def _tell_progress(self) -> None:
        label = f"{self._work}: {self._num_running} running, {self._ledger.num_failed} failed"
        if self._queue.num_goldens:
            label += f", {self._queue.num_goldens} goldens to make"
        self._progress(label, self._ledger.num_ended, len(self._cases) - self._ledger.num_resumed)
