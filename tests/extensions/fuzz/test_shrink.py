"""The smallest workload that fails: held against failures whose smallest workload is known."""

from itertools import pairwise

from harness.extensions.fuzz.search import shrink, smaller
from harness.extensions.fuzz.workload import Searched, SearchedRequest

LARGE = Searched(
    requests=(
        SearchedRequest(sequence=7, prompt_length=20, num_new=5, arrival=3),
        SearchedRequest(sequence=0, prompt_length=30, num_new=9, is_aborted=True),
        SearchedRequest(sequence=8, prompt_length=11, num_new=2, arrival=99),
        SearchedRequest(sequence=1, prompt_length=25, num_new=3, arrival=5),
        SearchedRequest(sequence=3, prompt_length=17, num_new=5),
    ),
    limits=(("max_num_batched_tokens", 7), ("block_size", 16), ("num_blocks", 9), ("enable_prefix_caching", True)),
)


def never():
    return False


def shares_two_blocks(translator):
    """Two requests of at least 16 common tokens of prompt, with the prefix cache on."""

    def fails(workload):
        pairs = [
            (first, second) for at, first in enumerate(workload.requests) for second in workload.requests[at + 1 :]
        ]
        return bool(workload.limit("enable_prefix_caching")) and any(
            min(translator.pool.shared(first.sequence, second.sequence), first.prompt_length, second.prompt_length)
            >= 16
            for first, second in pairs
        )

    return fails


def test_requests_events_limits_and_rows_go(translator):
    workload = translator.fitted(LARGE)
    smallest = shrink(workload, translator, shares_two_blocks(translator), never)
    assert len(smallest.requests) == 2
    assert [(request.prompt_length, request.num_new) for request in smallest.requests] == [(16, 1), (16, 1)]
    assert not any(request.arrival or request.is_aborted for request in smallest.requests)
    assert smallest.limits == (("enable_prefix_caching", True),)


def test_what_is_needed_stays(translator):
    def fails(workload):
        return any(request.arrival >= 2 and request.num_new >= 2 for request in workload.requests)

    (request,) = shrink(translator.fitted(LARGE), translator, fails, never).requests
    assert (request.arrival, request.num_new, request.prompt_length) == (2, 2, 1)


def test_a_fork_goes_where_it_is_not_needed(translator):
    fork = SearchedRequest(sequence=1, prompt_length=8, num_new=2, fork_of=0)
    workload = translator.fitted(Searched(requests=(SearchedRequest(sequence=0, prompt_length=8, num_new=3), fork)))
    assert workload.requests[1].fork_of == 0
    smallest = shrink(workload, translator, lambda candidate: len(candidate.requests) == 2, never)
    assert smallest.requests[1].fork_of is None
    kept = shrink(workload, translator, lambda candidate: any(r.fork_of is not None for r in candidate.requests), never)
    assert len(kept.requests) == 2


def test_no_workload_is_run_twice_and_each_step_is_smaller(translator):
    asked, kept, fails = [], [], shares_two_blocks(translator)

    def counted(workload):
        asked.append(workload)
        if fails(workload):
            kept.append(workload)
        return fails(workload)

    shrink(translator.fitted(LARGE), translator, counted, never)
    assert len(asked) == len(set(asked))
    assert all(after.cost < before.cost for before, after in pairwise(kept))


def test_when_the_time_is_up_what_there_is_is_returned(translator):
    workload = translator.fitted(LARGE)
    assert shrink(workload, translator, lambda candidate: True, lambda: True) == workload


def test_a_block_is_made_as_small_as_those_of_engines(translator):
    sizes = {item.limit("block_size") for item in smaller(LARGE)} - {16, None}
    assert sizes == {4, 8}


def test_a_schedule_by_name_becomes_plain(translator):
    workload = Searched(requests=(SearchedRequest(sequence=0, prompt_length=9, num_new=2),), schedule="batched")
    assert shrink(workload, translator, lambda candidate: True, never).schedule == "plain"
    chunked = Searched(requests=workload.requests, schedule="chunked:3")
    assert (
        shrink(chunked, translator, lambda candidate: ":" in (candidate.schedule or ""), never).schedule == "chunked:3"
    )
