"""The search itself, with a judge that decides by the workload alone."""

import signal
import time
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from harness.engines import Capabilities, Engine
from harness.errors import Code, HarnessError
from harness.extensions.fuzz import search as module
from harness.extensions.fuzz.judge import DeadlineError, WorkloadJudgement, deadline
from harness.extensions.fuzz.search import Search
from harness.results.check import Coverage, Divergence, Outcome, RunResult, TokenResult, Verdict


def result(tap=None):
    divergence = tap and Divergence(tap=tap, request=0, position=0, verdict=Verdict.BUG, code=Code.LOCAL_ERROR)
    return RunResult(
        schedule="searched", outcome=Outcome.MISMATCH if tap else Outcome.PASS, num_rows=1, taps=(), findings=(),
        first_divergence=divergence, tokens=TokenResult(), logits=None, coverage=Coverage(),
    )  # fmt: skip


@dataclass
class Judge:
    """Judges by a function of the workload that is sent."""

    decide: Any
    capabilities: Capabilities
    limit_s: float = 5.0
    limits: list[float | None] = field(default_factory=list)

    def __post_init__(self):
        self.engine: Engine = SimpleNamespace(capabilities=self.capabilities)
        self.plan = SimpleNamespace(case=SimpleNamespace(engine="stub"))

    def judge(self, sent, *, explain=False, limit_s=None):
        self.limits.append(limit_s)
        return self.decide(sent)


@pytest.fixture
def searching(translator, capabilities):
    def make(decide, **options):
        judge = Judge(decide, capabilities)
        return judge, Search(judge=judge, translator=translator, **{"seconds": 600.0, **options})

    return make


def until(number, decide):
    """End the search, as Ctrl-C does, when so many workloads were asked about: no test waits for a clock."""
    asked = count(1)

    def counted(sent):
        if next(asked) > number:
            raise KeyboardInterrupt
        return decide(sent)

    return counted


def sound(sent):
    return WorkloadJudgement(run=result(), conditions=frozenset({f"{len(sent.requests)} requests"}))


def has_two(sent):
    return WorkloadJudgement(run=result("model.layers.2.self_attn.q_proj" if len(sent.requests) >= 2 else None))


def test_a_sound_engine_has_no_findings(searching):
    _, search = searching(until(50, sound))
    search.run()
    assert search.all_findings() == ()
    assert search.num_workloads == 50
    assert search.num_workloads == sum(search.coverage.values())


def test_when_the_time_is_up_the_search_ends(searching):
    _, search = searching(sound, seconds=1e-9)
    search.run()
    assert search.num_workloads == 1  # or a search on a slow machine would check nothing
    assert not search.was_interrupted


def test_a_finding_is_shrunk(searching):
    _, search = searching(has_two, is_first_enough=True)
    search.run()
    (finding,) = search.all_findings()
    assert finding.signature == "H040: self_attn.q_proj"
    assert len(finding.workload.requests) == 2
    assert finding.workload.num_rows == 2
    assert finding.workload.limits == {}


@pytest.mark.slow
def test_findings_of_different_operations_are_told_apart(searching):
    def decide(sent):
        if any(request.is_aborted for request in sent.requests):
            return WorkloadJudgement(run=result("model.layers.0.attention"))
        if sent.limits.get("enable_prefix_caching"):
            return WorkloadJudgement(run=result("model.layers.0.k_cache"))
        return sound(sent)

    _, search = searching(until(500, decide))
    search.run()
    assert {finding.signature for finding in search.all_findings()} == {"H040: attention", "H040: k_cache"}
    assert all(finding.num_failures > 1 for finding in search.all_findings())


def test_the_same_seed_searches_the_same_workloads(searching):
    def first(seed):
        seen = []

        def note(sent):
            seen.append(sent)
            return sound(sent)

        searching(until(40, note), seed=seed)[1].run()
        return seen

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_ctrl_c_keeps_what_was_found(searching):
    _, search = searching(until(100, has_two))
    search.run()
    assert search.was_interrupted
    assert len(search.all_findings()) == 1


def test_ctrl_c_while_shrinking_keeps_the_workload_as_it_was_found(searching):
    num_asked = 0

    def decide(sent):
        nonlocal num_asked
        judged = has_two(sent)
        num_asked += judged.signature is not None
        if num_asked == 3:  # found, explained, and now the first that is smaller
            raise KeyboardInterrupt
        return judged

    _, search = searching(decide)
    search.run()
    (finding,) = search.all_findings()
    assert search.was_interrupted
    assert finding.shrunk_s == 0


def test_what_an_engine_does_not_serve_is_no_finding(searching):
    error = HarnessError(Code.ENGINE_CANNOT_SERVE, "too long")
    _, search = searching(until(5, lambda sent: WorkloadJudgement(error=error)))
    search.run()
    assert search.all_findings() == ()
    assert search.num_workloads == 0
    assert search.rejected["too long"] == 5


def test_errors_are_told_apart_by_their_words_not_by_their_numbers(searching):
    def decide(sent):
        return WorkloadJudgement(error=HarnessError(Code.ENGINE_FAILED, f"no block {len(sent.requests)}"))

    _, search = searching(until(100, decide))
    search.run()
    assert [finding.signature for finding in search.all_findings()] == ["H017: no block #"]


def test_a_finding_that_does_not_come_again_says_so(searching):
    num_asked = 0

    def decide(sent):
        nonlocal num_asked
        num_asked += 1
        return WorkloadJudgement(run=result("model.norm" if num_asked == 1 else None))

    _, search = searching(decide, is_first_enough=True)
    search.run()
    (finding,) = search.all_findings()
    assert "a second run of the same workload did not show it" in finding.signature


def test_shrinking_ends_when_its_time_is_up(searching, monkeypatch):
    monkeypatch.setattr(module, "SHRINKING_S", 0.0)
    _, search = searching(has_two, is_first_enough=True)
    search.run()
    (finding,) = search.all_findings()
    assert len(finding.workload.requests) == finding.num_requests_found


def test_while_shrinking_an_engine_hangs_sooner(searching):
    judge, search = searching(has_two, is_first_enough=True)
    search.run()
    assert set(judge.limits) == {None, module.SHORTEST_LIMIT_S}


def test_a_deadline_ends_what_waits_for_ever():
    begin = time.perf_counter()
    with pytest.raises(DeadlineError), deadline(0.05):
        time.sleep(600)
    assert time.perf_counter() - begin < 500


def test_a_deadline_that_is_kept_leaves_nothing_behind():
    handler = signal.getsignal(signal.SIGALRM)
    with deadline(600):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is handler


def test_an_engine_that_swallows_exceptions_is_ended_as_well():
    def swallow():
        while True:
            try:
                time.sleep(30)
            except Exception:
                continue

    with pytest.raises(DeadlineError), deadline(0.05):
        swallow()
