"""Workloads of a search: what is impossible is made possible, and what is sent is what was meant."""

import pytest

from harness.engines import LIMITS
from harness.extensions.fuzz.result import SentWorkload
from harness.extensions.fuzz.workload import (
    SEGMENT,
    Searched,
    SearchedRequest,
    SequencePool,
    Translator,
    engine_workload,
)


def workload(*requests, **limits):
    return Searched(requests=requests, limits=tuple(limits.items()))


@pytest.mark.parametrize(
    ("unfitted", "fitted"),
    [
        (SearchedRequest(sequence=0, prompt_length=0), (1, 1)),
        (SearchedRequest(sequence=0, prompt_length=1000, num_new=3), (46, 3)),
        (SearchedRequest(sequence=0, prompt_length=7, num_new=0), (7, 1)),
        (SearchedRequest(sequence=0, prompt_length=7, num_new=1000), (1, 48)),
    ],
)
def test_lengths_are_those_of_the_sequence(translator, unfitted, fitted):
    (request,) = translator.fitted(workload(unfitted)).requests
    assert (request.prompt_length, request.num_new) == fitted


def test_the_longest_request_fits_into_the_blocks(translator):
    long = SearchedRequest(sequence=0, prompt_length=16, num_new=2)
    assert translator.fitted(workload(long, block_size=4, num_blocks=2)).limit("num_blocks") == 1 + 5
    assert translator.fitted(workload(long, block_size=4, num_blocks=20)).limit("num_blocks") == 20
    aborted = SearchedRequest(sequence=0, prompt_length=16, num_new=1, is_aborted=True)  # it asks for one token more
    assert translator.fitted(workload(aborted, block_size=4, num_blocks=2)).limit("num_blocks") == 1 + 5
    assert translator.fitted(workload(long)).limit("num_blocks") is None


def test_blocks_for_some_of_the_prompts(translator):
    lengths = [SearchedRequest(sequence=0, prompt_length=length) for length in (4, 17, 8)]
    unfitted = workload(*lengths, block_size=4)
    assert [translator.of_prompts(unfitted, number) for number in (1, 2, 3)] == [1 + 5, 1 + 7, 1 + 8]


def test_where_the_workload_does_not_say_the_option_does(pool):
    assert Translator(pool, None, {"block_size": "8"}).block_size == 8
    assert Translator(pool, None, {"block_size": "many"}).block_size == 16
    assert Translator(pool, None).block_size == 16


ORIGINAL = SearchedRequest(sequence=0, prompt_length=SEGMENT, num_new=3)
FORK = SearchedRequest(sequence=1, prompt_length=3, num_new=2, fork_of=0, arrival=4)


def test_a_fork_goes_on_from_its_originals_prompt(translator):
    fork = translator.fitted(workload(ORIGINAL, FORK)).requests[1]
    assert (fork.fork_of, fork.prompt_length, fork.num_new, fork.arrival) == (0, SEGMENT, 2, 0)


@pytest.mark.parametrize(
    ("original", "fork"),
    [
        (SearchedRequest(sequence=0, prompt_length=8, num_new=1), FORK),  # it has ended
        (SearchedRequest(sequence=8, prompt_length=8, num_new=3), FORK),  # nothing in common
        (SearchedRequest(sequence=0, prompt_length=32, num_new=3), FORK),  # not the first token after the prompt
        (ORIGINAL, SearchedRequest(sequence=1, prompt_length=3, num_new=2, fork_of=1)),  # of itself
        (ORIGINAL, SearchedRequest(sequence=1, prompt_length=3, num_new=2, fork_of=7)),  # of nobody
    ],
)
def test_a_fork_that_cannot_be_is_a_request_of_its_own(translator, original, fork):
    assert translator.fitted(workload(original, fork)).requests[1].fork_of is None


def test_a_fork_of_a_fork_is_a_request_of_its_own(translator):
    second = SearchedRequest(sequence=0, prompt_length=8, num_new=2, fork_of=1)
    assert translator.fitted(workload(ORIGINAL, FORK, second)).requests[2].fork_of is None


def test_what_fits_stays(translator):
    unfitted = translator.fitted(workload(ORIGINAL, FORK, SearchedRequest(sequence=3, prompt_length=5), block_size=4))
    assert translator.fitted(unfitted) == unfitted


def test_an_engine_is_told_all_of_it(translator):
    unfitted = workload(
        ORIGINAL, FORK, SearchedRequest(sequence=3, prompt_length=5, arrival=2, is_aborted=True), block_size=4
    )
    sent = translator.sent(translator.fitted(unfitted))
    asked = engine_workload(sent)
    assert [request.id for request in asked.requests] == [0, 1, 2]
    assert [request.prompt_length for request in asked.requests] == [SEGMENT, SEGMENT + 1, 5]
    assert [len(request.token_ids) for request in asked.requests] == [SEGMENT + 2, SEGMENT + 1, 5]
    assert asked.timeline is not None
    assert asked.timeline.limits == {"block_size": 4}
    assert asked.timeline.arrivals == {2: 2}
    assert asked.timeline.aborted == {2}
    assert asked.timeline.forks == {1: 0}


def test_an_engine_without_control_is_told_a_schedule():
    pool = SequencePool(((1, 2, 3, 4),))
    unfitted = Searched(requests=(SearchedRequest(sequence=0, prompt_length=3, num_new=2),), schedule="prefix-hit")
    asked = engine_workload(Translator(pool, None).sent(unfitted))
    assert asked.timeline is None
    assert asked.schedule.name == "prefix-hit"
    assert [(copy.id, copy.token_ids) for copy in asked.copies] == [(1, [1, 2, 3, 4])]


def searched(sent: SentWorkload) -> Searched:
    """Return a workload whose pool is `SequencePool.of(sent)`."""
    return Searched(
        requests=tuple(
            SearchedRequest(
                sequence=number,
                prompt_length=request.prompt_length,
                num_new=request.num_new_tokens,
                arrival=request.arrival,
                is_aborted=request.is_aborted,
                fork_of=request.fork_of,
            )
            for number, request in enumerate(sent.requests)
        ),
        limits=tuple((name, sent.limits[name]) for name in LIMITS if name in sent.limits),
        schedule=sent.schedule,
    )


def test_a_workload_that_was_sent_can_be_searched_again(translator):
    unfitted = translator.fitted(workload(ORIGINAL, FORK, block_size=4, enable_prefix_caching=True))
    sent = translator.sent(unfitted)
    again = Translator(SequencePool.of(sent), translator.control)
    assert again.sent(again.fitted(searched(sent))) == sent
