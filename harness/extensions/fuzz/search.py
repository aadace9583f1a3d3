"""Searching for workloads that an engine gets wrong, and the smallest workload that still fails in the same way.

Workloads are at hand as data, so they are made smaller as data: fewest requests, then fewest events, limits and rows.
Hypothesis's shrinker works on the numbers that were drawn, and takes many more runs.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, Phase, given
from hypothesis import seed as seeded
from hypothesis import settings as Settings  # noqa: N812  # a type, whatever Hypothesis calls it
from hypothesis.errors import Unsatisfiable

from harness.base.progress import Progress
from harness.extensions.fuzz.judge import WorkloadJudge, WorkloadJudgement, pairs
from harness.extensions.fuzz.result import FuzzFinding
from harness.extensions.fuzz.strategies import Strategies, without_request
from harness.extensions.fuzz.workload import Searched, SearchedRequest, Translator

_BLOCK_SIZES = (4, 8)
_LEAST = {"max_num_batched_tokens": 2, "max_num_seqs": 1, "num_blocks": 2}


def shrink(
    workload: Searched,
    translator: Translator,
    fails: Callable[[Searched], bool],
    is_time_up: Callable[[], bool],
) -> Searched:
    """Return the smallest workload found that fails.

    `fails` says whether a workload fails in the same way, and is asked once about each; `is_time_up` whether to be
    content with what there is.
    """
    known = {workload}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in map(translator.fitted, smaller(workload)):
            if is_time_up():
                return workload
            if candidate in known or candidate.cost >= workload.cost:
                continue
            known.add(candidate)
            if fails(candidate):
                workload, is_smaller = candidate, True
                break
    return workload


def smaller(workload: Searched) -> Iterator[Searched]:
    """Yield smaller workloads, the boldest first."""
    numbers = range(len(workload.requests))
    if len(numbers) > 2:
        for first in (0, len(numbers) // 2):
            half = workload
            for at in reversed(range(first, first + len(numbers) // 2)):
                half = without_request(half, at)
            yield half
    if len(numbers) > 1:
        yield from (without_request(workload, at) for at in reversed(numbers))
    yield _map_requests(workload, lambda request: replace(request, arrival=0, is_aborted=False))
    for name, _ in workload.limits:
        yield workload.with_limit(name, None)
    for at in numbers:
        yield from (_with(workload, at, request) for request in _simpler(workload.requests[at]))
    yield from _with_smaller_sizes(workload)
    yield _map_requests(workload, lambda request: replace(request, prompt_length=max(1, request.prompt_length // 2)))
    yield _map_requests(workload, lambda request: replace(request, num_new=min(2, request.num_new)))
    for at in numbers:
        yield from (_with(workload, at, request) for request in _shorter(workload.requests[at]))
    if workload.schedule is not None and ":" not in workload.schedule and workload.schedule != "plain":
        yield replace(workload, schedule="plain")


def _with_smaller_sizes(workload: Searched) -> Iterator[Searched]:
    for name, value in workload.limits:
        if name == "block_size":  # sizes that engines have: what fails at 5 tokens alone is rare, and hard to read
            yield from (workload.with_limit(name, size) for size in _BLOCK_SIZES if size < value)
        elif name in _LEAST:
            yield from (workload.with_limit(name, number) for number in _numbers_below(int(value), _LEAST[name]))


def _simpler(request: SearchedRequest) -> Iterator[SearchedRequest]:
    if request.fork_of is not None:
        yield replace(request, fork_of=None)
    if request.is_aborted:
        yield replace(request, is_aborted=False)
    for arrival in _numbers_below(request.arrival, 0):
        yield replace(request, arrival=arrival)


def _shorter(request: SearchedRequest) -> Iterator[SearchedRequest]:
    for number in _numbers_below(request.prompt_length, 1):
        yield replace(request, prompt_length=number)
    for number in _numbers_below(request.num_new, 1):
        yield replace(request, num_new=number)
    for number in _numbers_below(request.sequence, 0):
        yield replace(request, sequence=number)


def _numbers_below(number: int, least: int) -> list[int]:
    return sorted(
        {smaller_number for smaller_number in (least, number // 2, number - 1) if least <= smaller_number < number}
    )


def _with(workload: Searched, at: int, request: SearchedRequest) -> Searched:
    return replace(workload, requests=(*workload.requests[:at], request, *workload.requests[at + 1 :]))


def _map_requests(workload: Searched, change: Callable[[SearchedRequest], SearchedRequest]) -> Searched:
    return replace(workload, requests=tuple(map(change, workload.requests)))


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
        num_found = f", {len(self.findings)} found" if self.findings else ""
        return f"{self.judge.plan.case.engine}, searching{num_found}"

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
        self, workload: Searched, original: Searched, signature: str, found_s: float, shrunk_s: float
    ) -> FuzzFinding:
        sent = self.translator.sent(workload)
        judged = self.judge.judge(sent, explain=True)
        note = "" if judged.signature == signature else "; a second run of the same workload did not show it"
        before = self.translator.sent(original)
        return judged.finding(sent, signature + note, original=before, found_s=found_s, shrunk_s=shrunk_s)

    def all_findings(self) -> tuple[FuzzFinding, ...]:
        """Return the findings with the numbers of workloads that failed like each, in the order of the search."""
        return tuple(
            replace(finding, num_failures=self.failures[signature]) for signature, finding in self.findings.items()
        )
