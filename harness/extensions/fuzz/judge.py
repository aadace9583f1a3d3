"""One workload on the engine, judged against the pool's golden as a check judges."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from harness.base.files import scratch_folder
from harness.engines import Engine, engine_errors
from harness.engines.record import open_writer
from harness.errors import Code, HarnessError
from harness.extensions.fuzz.coverage import conditions
from harness.extensions.fuzz.deadline import DeadlineError, deadline
from harness.extensions.fuzz.result import FuzzFinding, SentWorkload
from harness.extensions.fuzz.workload import engine_workload
from harness.formats.recording import Recording
from harness.formats.taps import site_of
from harness.judge.explain import explain_run
from harness.judge.jobs.check import compare_planned
from harness.judge.jobs.engine_run import describe_run
from harness.oracle.golden import Golden
from harness.oracle.model import HFModel
from harness.plan import Plan
from harness.results.check import Outcome, RunResult

SCHEDULE = "searched"
_NOT_SERVED = (Code.ENGINE_CANNOT_SERVE, Code.BAD_OPTION, Code.PROMPT_TOO_LONG)
"""Codes by which an engine says beforehand that it does not serve a workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadJudgement:
    """The result of one workload."""

    run: RunResult | None = None
    """None if the engine did not come to its end."""
    error: HarnessError | None = None
    """The error that ended the run."""
    conditions: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_rejected(self) -> bool:
        """Whether the engine said that it does not serve the workload."""
        return self.error is not None and self.error.code in _NOT_SERVED

    @property
    def signature(self) -> str | None:
        """Code and operation of what is wrong; None if nothing is, or the engine refused the workload."""
        if self.error is not None:
            return None if self.is_rejected else f"{self.error.code}: {_first_words(self.error)}"
        if self.run is None or self.run.outcome is Outcome.PASS:
            return None
        first = self.run.first_divergence
        if first is not None:
            # A slot that no step wrote may be finite in one run and not in the next.
            code = Code.LOCAL_ERROR if first.code is Code.NOT_FINITE else first.code
            return f"{code}: {site_of(first.tap)}"
        if not self.run.findings:
            return str(Code.NOTHING_CHECKED)
        finding = self.run.findings[0]
        return f"{finding.code}: {site_of(finding.tap)}" if finding.tap else str(finding.code)

    def finding(
        self, workload: SentWorkload, signature: str, *, found: SentWorkload, found_s: float, shrunk_s: float = 0.0
    ) -> FuzzFinding:
        """Return the finding of a workload that is wrong; `found`: the same before it was shrunk."""
        return FuzzFinding(
            signature=signature,
            workload=workload,
            run=self.run,
            error=None if self.error is None else str(self.error),
            found_s=found_s,
            shrunk_s=shrunk_s,
            num_rows_found=found.num_rows,
            num_requests_found=len(found.requests),
        )


def _first_words(error: HarnessError) -> str:
    """Return what is alike in errors that differ by numbers only."""
    words = error.what.splitlines()[0] if error.what else ""
    return "".join("#" if character.isdecimal() else character for character in words)[:80]


@dataclass(frozen=True, kw_only=True)
class WorkloadJudge:
    """An engine, and what it is held to."""

    plan: Plan
    engine: Engine
    hf: HFModel
    golden: Golden
    limit_s: float
    """Seconds that the engine may take for one workload."""
    planted: Callable[[], AbstractContextManager[object]] = nullcontext
    """Puts a known bug into the engine, anew for each workload."""

    def judge(
        self, workload: SentWorkload, *, explain: bool = False, limit_s: float | None = None
    ) -> WorkloadJudgement:
        """Run one workload and judge every row of it."""
        with scratch_folder("harness-") as folder:
            path = folder / "recording"
            try:
                self._record(workload, path, limit_s or self.limit_s)
            except HarnessError as error:
                return WorkloadJudgement(error=error)
            with Recording.open(path, verify=False) as actual:  # written a moment ago by ourselves
                return self._compared(actual, explain=explain)

    def _record(self, workload: SentWorkload, path: Path, limit_s: float) -> None:
        asked = engine_workload(workload)
        run = describe_run(self.plan, asked.schedule, asked.requests, path, copies=asked.copies)
        writer = open_writer(self.engine, run, schedule=workload.schedule or SCHEDULE)
        with writer, timed(self.plan.case.engine, limit_s), self.planted():
            self.engine.run(asked, writer)

    def _compared(self, actual: Recording, *, explain: bool) -> WorkloadJudgement:
        found = compare_planned(self.plan, self.engine.capabilities, actual, self.golden, self.hf)
        run = explain_run(found, actual, self.golden, self.hf) if explain else found.result
        return WorkloadJudgement(run=run, conditions=conditions(actual))


@contextmanager
def timed(engine: str, limit_s: float) -> Iterator[None]:
    """Limit the time of the engine in the block.

    Raises:
        HarnessError: ENGINE_FAILED: it did not come to its end; as `engine_errors`.
    """
    with engine_errors(engine):
        try:
            with deadline(limit_s):
                yield
        except DeadlineError:
            raise HarnessError(
                Code.ENGINE_FAILED,
                "the engine did not come to its end in time",
                where=engine,
                expected=f"at most {limit_s:g} s",
                hint="--workload-seconds, if it is only slow",
            ) from None
