"""One workload on the engine, judged against the pool's golden as a check judges, within a limit of time.

Events of the scheduler tell a search that a workload does something new: triggers, as a check has them; what a step is
made of; and what becomes of KV blocks from one step to the next, where the engine records its block tables.

The limit is wall time, because an engine that waits for ever uses no CPU time. It rests on SIGALRM, which only the main
thread gets, and which Python handles between its own instructions: code in C that never returns is not interrupted.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from types import FrameType

from harness.base.files import scratch_folder
from harness.engines import Engine, engine_errors
from harness.engines.record import open_writer
from harness.errors import Code, HarnessError
from harness.extensions.fuzz.result import FuzzFinding, SentWorkload
from harness.extensions.fuzz.workload import engine_workload
from harness.formats.recording import Recording, Step
from harness.formats.taps import site_of
from harness.judge.compare.align import is_readback
from harness.judge.compare.triggers import reached_triggers
from harness.judge.explain import explain_run
from harness.judge.jobs.check import compare_planned
from harness.judge.jobs.opened import describe_run
from harness.oracle.golden import Golden
from harness.oracle.model import HFModel
from harness.plan import Plan
from harness.results.check import Outcome, RunResult

AGAIN_S = 0.1
"""The signal comes again where the code that it interrupts swallows exceptions."""


class DeadlineError(BaseException):
    """The engine did not come to its end in time; not an Exception, so that the engine does not catch it."""


@contextmanager
def deadline(limit_s: float) -> Iterator[None]:
    """Raise DeadlineError in the block after so many seconds; the timer and handler of others are put back.

    Outside of the main thread, and if there is no SIGALRM, nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    handler = signal.signal(signal.SIGALRM, _raise)
    timer = signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def _raise(_: int, frame: FrameType | None) -> None:
    # An exception in Hypothesis' callback of the garbage collector is lost and reported; the signal comes again.
    if frame is None or frame.f_code.co_name != "gc_callback":
        raise DeadlineError


MANY = 3
"""From so many on, numbers are not told apart."""
Tables = Mapping[int, Sequence[int]]


def conditions(recording: Recording) -> frozenset[str]:
    """Return the conditions that a run reached, in words for people."""
    steps = [step for step in recording.steps if not is_readback(step)]
    prompt_lengths = {request.id: request.prompt_length for request in recording.manifest.requests}
    reached = {name.replace("_", " ") for name in reached_triggers(recording)}
    reached |= {_mixture(step, prompt_lengths) for step in steps}
    reached |= set(_interrupted(steps, prompt_lengths))
    reached |= set(_block_transitions([step.block_tables or {} for step in steps]))
    return frozenset(reached)


def pairs(reached: frozenset[str]) -> frozenset[str]:
    """Return the conditions and every two of them together: what a search takes for new."""
    return reached | {f"{first} & {second}" for first, second in combinations(sorted(reached), 2)}


def _mixture(step: Step, prompt_lengths: Mapping[int, int]) -> str:
    """Say how many requests of a step decode and how many compute prompts."""
    requests = step.request.tolist()
    prefilling = {
        request
        for request, position in zip(requests, step.position.tolist(), strict=True)
        if position < prompt_lengths[request]
    }
    return f"step of {_many(len(set(requests) - prefilling))} decodes and {_many(len(prefilling))} prompts"


def _interrupted(steps: Sequence[Step], prompt_lengths: Mapping[int, int]) -> Iterator[str]:
    """Say that a request began again, or waited, before its prompt was computed."""
    computed: dict[int, int] = {}
    """By request, the last position of its last step."""
    for step in steps:
        present = set(step.request.tolist())
        amid = {request for request, last in computed.items() if last < prompt_lengths[request] - 1}
        if amid - present:
            yield "prompt interrupted"
        for request in present:
            positions = step.position[step.request == request]
            if request in amid and int(positions.min()) <= computed[request]:
                yield "preempted amid its prompt"
            computed[request] = int(positions.max())


def _many(number: int) -> str:
    return str(number) if number < MANY else f"{MANY}+"


def _block_transitions(tables: Sequence[Tables]) -> Iterator[str]:
    """Say what becomes of blocks; a request that a step does not compute is not seen to own anything in it."""
    before: dict[int, frozenset[int]] = {}
    owned: dict[int, frozenset[int]] = {}
    """By block, its owners when it was last seen."""
    previous: Tables = {}
    for step in tables:
        owners = _owners(step)
        yield from (_transition(before.get(block), owned.get(block), now) for block, now in owners.items())
        yield from ("block freed" for block in before if block not in owners)
        for request, blocks in step.items():
            if any(was != now for was, now in zip(previous.get(request, ()), blocks, strict=False)):
                yield "block replaced in a table"
        before, owned, previous = owners, owned | owners, step


def _owners(tables: Tables) -> dict[int, frozenset[int]]:
    owners: dict[int, set[int]] = {}
    for request, blocks in tables.items():
        for block in blocks:
            owners.setdefault(block, set()).add(request)
    return {block: frozenset(requests) for block, requests in owners.items()}


def _transition(before: frozenset[int] | None, last: frozenset[int] | None, now: frozenset[int]) -> str:
    if before is None and last is None:
        return "block taken for the first time" if len(now) == 1 else "block taken for the first time by several"
    if before is None:
        return "block taken again by its last owner" if now == last else "block taken again by another"
    if len(now) > len(before):
        return "block shared"
    if len(now) < len(before):
        return "block shared no more"
    return "block kept" if now == before else "block handed over"


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
        self, workload: SentWorkload, signature: str, *, original: SentWorkload, found_s: float, shrunk_s: float = 0.0
    ) -> FuzzFinding:
        """Return the finding of a workload that is wrong; `original`: the same before it was shrunk."""
        return FuzzFinding(
            signature=signature,
            workload=workload,
            run=self.run,
            error=None if self.error is None else str(self.error),
            found_s=found_s,
            shrunk_s=shrunk_s,
            num_rows_found=original.num_rows,
            num_requests_found=len(original.requests),
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
        comparison = compare_planned(self.plan, self.engine.capabilities, actual, self.golden, self.hf)
        run = explain_run(comparison, actual, self.golden, self.hf) if explain else comparison.result
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
