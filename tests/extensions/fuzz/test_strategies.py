"""What is drawn can be sent as it is, and covers what a search is for."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness.engines import Capabilities, Control
from harness.extensions.fuzz.strategies import SEARCHED, Strategies, without_request
from harness.extensions.fuzz.workload import Searched, SearchedRequest, Translator


def drawn(strategy, number=200):
    drawn_workloads = []
    quick = settings(
        max_examples=number, database=None, derandomize=True, deadline=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    quick(given(strategy)(lambda workload: drawn_workloads.append(workload)))()
    return drawn_workloads


@pytest.fixture(scope="module")
def fresh(translator, capabilities):
    return drawn(Strategies(translator, capabilities).workloads(()))


def test_what_is_drawn_fits(translator, fresh):
    assert all(translator.fitted(workload) == workload for workload in fresh)


def test_what_is_changed_fits(translator, capabilities, fresh):
    changed = drawn(Strategies(translator, capabilities).workloads(fresh[:40]))
    assert all(translator.fitted(workload) == workload for workload in changed)


def test_everything_that_an_engine_leaves_to_a_workload_is_drawn(fresh, capabilities):
    assert {name for workload in fresh for name, _ in workload.limits} == set(capabilities.control.limits)
    requests = [request for workload in fresh for request in workload.requests]
    assert any(request.is_aborted for request in requests)
    assert any(request.fork_of is not None for request in requests)
    assert any(request.arrival for request in requests)


def test_nothing_else_is_drawn(pool):
    control = Control(limits=("max_num_seqs",))
    workloads = drawn(Strategies(Translator(pool, control), Capabilities(schedules=(), control=control)).workloads(()))
    assert {name for workload in workloads for name, _ in workload.limits} == {"max_num_seqs"}
    requests = [request for workload in workloads for request in workload.requests]
    assert not any(request.is_aborted or request.fork_of is not None for request in requests)


def test_an_engine_without_control_is_searched_by_its_schedules(pool):
    capabilities = Capabilities(schedules=("plain", "mixed", "forked"))
    workloads = drawn(Strategies(Translator(pool, None), capabilities).workloads(()))
    names = {str(workload.schedule).partition(":")[0] for workload in workloads}
    assert names == {"plain", "mixed"}
    assert len({workload.schedule for workload in workloads}) > 3
    assert not any(request.arrival for workload in workloads for request in workload.requests)
    assert not any(workload.limits for workload in workloads)


def test_schedules_that_need_more_than_beginnings_are_not_searched():
    assert "forked" not in SEARCHED
    assert {"plain", "chunked", "batched", "mixed", "prefix-hit", "preempted"} <= set(SEARCHED)


@given(st.integers(0, 3))
def test_forks_follow_the_request_that_they_are_forks_of(at):
    one = SearchedRequest(sequence=0, prompt_length=4, num_new=3)
    forks = Searched(requests=(one, one, SearchedRequest(sequence=0, prompt_length=4, num_new=2, fork_of=1), one))
    kept = without_request(forks, at)
    assert len(kept.requests) == 3
    assert [request.fork_of for request in kept.requests] == {
        0: [None, 0, None], 1: [None, None, None], 2: [None] * 3, 3: [None, None, 1]
    }[at]  # fmt: skip
