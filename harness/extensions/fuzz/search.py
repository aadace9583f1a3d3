"""Searching for workloads that an engine gets wrong, for so many seconds."""

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, Phase, given
from hypothesis import seed as seeded
from hypothesis import settings as Settings  # noqa: N812  # a type, whatever Hypothesis calls it
from hypothesis.errors import Unsatisfiable

from harness.base.progress import Progress
from harness.extensions.fuzz.coverage import pairs
from harness.extensions.fuzz.judge import WorkloadJudge, WorkloadJudgement
from harness.extensions.fuzz.result import FuzzFinding
from harness.extensions.fuzz.shrink import shrink
from harness.extensions.fuzz.strategies import Strategies
from harness.extensions.fuzz.workload import Searched, Translator

EXAMPLES_OF_A_ROUND = 24
"""Workloads between two looks at what has reached something new."""
MOST_IN_CORPUS = 64
SHRINKING_S = 45.0
"""Seconds that shrinking one finding may take at most."""
SLOWEST = 4.0
"""Times that an engine may take for a smaller workload what it took for a sound one, before it counts as hanging."""
SHORTEST_LIMIT_S = 2.0


class SearchEndError(BaseException):
    """Ends a round of Hypothesis: the time is up, or enough is found; not an Exception, which it would shrink."""


@dataclass(kw_only=True)
class Search:
    """A search and what it has found so far: that stays if it is interrupted."""

    judge: WorkloadJudge
    translator: Translator
    seconds: float
    seed: int = 0
    is_first_enough: bool = False
    """Whether the first finding ends it."""
    began: float = field(default_factory=time.perf_counter)
    """When the command began: what a user waits for counts from here."""
    progress: Progress = lambda _label, _done, _total: None
    findings: dict[str, FuzzFinding] = field(default_factory=dict)
    """By signature."""
    failures: Counter[str] = field(default_factory=Counter)
    coverage: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    num_workloads: int = 0
    num_rows: int = 0
    was_interrupted: bool = False
    _known: set[Searched] = field(default_factory=set)
    _seen: set[str] = field(default_factory=set)
    """Conditions, alone and in pairs."""
    _corpus: list[Searched] = field(default_factory=list)
    _slowest_s: float = 0.0
    _until: float = 0.0

    def run(self) -> None:
        """Search until the time is up, or Ctrl-C."""
        self._until = time.perf_counter() + self.seconds
        strategies = Strategies(self.translator, self.judge.engine.capabilities)
        number = 0
        try:
            while not self._is_over():
                self._round(strategies, number)
                number += 1
        except KeyboardInterrupt:
            self.was_interrupted = True
        except SearchEndError:
            pass

    def _round(self, strategies: Strategies, number: int) -> None:
        """Draw some workloads; the corpus stays as it is for as long, so that Hypothesis can rely on it."""
        workloads = strategies.workloads(tuple(self._corpus[-MOST_IN_CORPUS:]))
        settings = Settings(
            max_examples=EXAMPLES_OF_A_ROUND,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )

        def one(workload: Searched) -> None:
            self._try(workload)

        with suppress(Unsatisfiable):
            settings(seeded(self.seed * 1_000_003 + number)(given(workloads)(one)))()

    def _is_over(self) -> bool:
        is_found = self.is_first_enough and bool(self.findings)
        return is_found or (time.perf_counter() >= self._until and self.num_workloads + self.rejected.total() > 0)

    def _try(self, workload: Searched) -> None:
        if self._is_over():
            raise SearchEndError
        if workload in self._known:
            return
        self._known.add(workload)
        left = max(0.0, self._until - time.perf_counter())
        self.progress(self._label(), int(self.seconds - left), int(self.seconds) or 1)
        begin = time.perf_counter()
        judged = self.judge.judge(self.translator.sent(workload))
        self._note(workload, judged, time.perf_counter() - begin)

    def _label(self) -> str:
        found = f", {len(self.findings)} found" if self.findings else ""
        return f"{self.judge.plan.case.engine}, searching{found}"

    def _note(self, workload: Searched, judged: WorkloadJudgement, took_s: float) -> None:
        if judged.is_rejected:
            assert judged.error is not None
            self.rejected[judged.error.what.splitlines()[0]] += 1
            return
        self.num_workloads += 1
        self.num_rows += sum(request.num_fed for request in workload.requests)
        self.coverage.update(judged.conditions)
        new = pairs(judged.conditions) - self._seen
        self._seen |= new
        signature = judged.signature
        if signature is not None:
            self.failures[signature] += 1
            if signature not in self.findings:
                self._keep(workload, signature)
            return
        self._slowest_s = max(self._slowest_s, took_s)
        if new:
            self._corpus.append(workload)

    def _keep(self, workload: Searched, signature: str) -> None:
        """Shrink a workload that fails, and keep it with its explanation."""
        found_s, begin = time.perf_counter() - self.began, time.perf_counter()
        self.findings[signature] = self._finding(workload, workload, signature, found_s, 0.0)
        until = begin + SHRINKING_S
        self.progress(f"{self.judge.plan.case.engine}, shrinking", 0, 1)
        limit_s = min(self.judge.limit_s, max(SHORTEST_LIMIT_S, SLOWEST * self._slowest_s))

        def fails(candidate: Searched) -> bool:
            judged = self.judge.judge(self.translator.sent(candidate), limit_s=limit_s)
            return judged.signature == signature

        smallest = shrink(workload, self.translator, fails, lambda: time.perf_counter() >= until)
        shrunk_s = time.perf_counter() - begin
        self.findings[signature] = self._finding(smallest, workload, signature, found_s, shrunk_s)

    def _finding(
        self, workload: Searched, found: Searched, signature: str, found_s: float, shrunk_s: float
    ) -> FuzzFinding:
        sent = self.translator.sent(workload)
        judged = self.judge.judge(sent, explain=True)
        note = "" if judged.signature == signature else "; a second run of the same workload did not show it"
        before = self.translator.sent(found)
        return judged.finding(sent, signature + note, found=before, found_s=found_s, shrunk_s=shrunk_s)

    def found(self) -> tuple[FuzzFinding, ...]:
        """Return the findings with the numbers of workloads that failed like each, in the order of the search."""
        return tuple(
            replace(finding, num_failures=self.failures[signature]) for signature, finding in self.findings.items()
        )
