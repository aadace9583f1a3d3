"""The smallest workload that still fails in the same way: fewest requests, then fewest events, limits and rows.

Workloads are at hand as data, so they are made smaller as data: Hypothesis's shrinker works on the numbers that were
drawn, and takes many more runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from harness.extensions.fuzz.strategies import without_request
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
    yield _each(workload, lambda request: replace(request, arrival=0, is_aborted=False))
    for name, _ in workload.limits:
        yield workload.with_limit(name, None)
    for at in numbers:
        yield from (_with(workload, at, request) for request in _simpler(workload.requests[at]))
    yield from _with_smaller_sizes(workload)
    yield _each(workload, lambda request: replace(request, prompt_length=max(1, request.prompt_length // 2)))
    yield _each(workload, lambda request: replace(request, num_new=min(2, request.num_new)))
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
    return sorted({other for other in (least, number // 2, number - 1) if least <= other < number})


def _with(workload: Searched, at: int, request: SearchedRequest) -> Searched:
    return replace(workload, requests=(*workload.requests[:at], request, *workload.requests[at + 1 :]))


def _each(workload: Searched, change: Callable[[SearchedRequest], SearchedRequest]) -> Searched:
    return replace(workload, requests=tuple(map(change, workload.requests)))
