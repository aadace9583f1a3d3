"""What a schedule leaves to its requests: which run together, and how many blocks they have."""

import pytest

from harness.engines import Workload
from harness.formats.recording import RequestInfo
from harness.formats.schedule import Schedule, parse_schedule

REQUESTS = [
    RequestInfo(id=0, token_ids=list(range(1, 10)), prompt_length=6),
    RequestInfo(id=1, token_ids=list(range(1, 5)), prompt_length=2),
]
COPY = RequestInfo(id=2, token_ids=list(range(1, 10)), prompt_length=6)


def workload(schedule, copies=()):
    return Workload(requests=REQUESTS, schedule=Schedule.of(schedule), copies=copies)


@pytest.mark.parametrize(
    ("schedule", "batches"), [("plain", [[0], [1], [2]]), ("prefix-hit", [[0], [1], [2]]), ("batched", [[0, 1, 2]])]
)
def test_requests_that_run_together(schedule, batches):
    assert [[request.id for request in batch] for batch in workload(schedule, [COPY]).batches] == batches


def test_all_requests_fit_with_the_token_that_each_samples_last():
    assert workload("plain").num_blocks(4) == 3 + 2  # 10 and 5 tokens
    assert workload("batched", [COPY]).num_blocks(4) == 3 + 2 + 3


def test_under_preempted_the_prompts_fit_but_not_what_follows():
    assert workload("preempted").num_blocks(4) == 3  # prompts of 6 and 2 tokens: 2 and 1 blocks; the longest: 3
    assert workload("preempted").num_blocks(1) == 10  # the longest alone needs more than both prompts


def drafted(schedule, *drafts):
    """The steps of the first request, by id and positions; each draft is (first wrong position, number of tokens)."""
    copies = [
        RequestInfo(id=2 + at, token_ids=[*range(1, first + 1), *[90 + at] * count], prompt_length=first, draft_of=0)
        for at, (first, count) in enumerate(drafts)
    ]
    steps = Workload(requests=REQUESTS, schedule=parse_schedule(schedule), copies=copies).steps(REQUESTS[0])
    return [[(request.id, *positions) for request, positions in step] for step in steps]


def test_a_request_that_goes_back_computes_the_last_token_of_its_prompt_again():
    wrong = [[(2, 6)], [(2, 7)]]
    decode = [[(0, 5)], [(0, 6)], [(0, 7)], [(0, 8)]]
    assert drafted("rewound", (6, 2)) == [[(0, 0, 1, 2, 3, 4, 5)], *wrong, *decode]
    assert drafted("rewound") == [[(0, 0, 1, 2, 3, 4, 5)], *decode[1:]]


def test_a_verification_holds_accepted_drafts_and_then_rejected_ones():
    prompt = [(0, 0, 1, 2, 3, 4, 5)]
    assert drafted("speculative:2") == [prompt, [(0, 6, 7, 8)]]
    assert drafted("speculative:2", (7, 2)) == [prompt, [(0, 6), (2, 7, 8)], [(0, 7, 8)]]
    assert drafted("speculative:1", (7, 1), (8, 1)) == [prompt, [(0, 6), (2, 7)], [(0, 7), (3, 8)], [(0, 8)]]


def test_drafts_run_with_the_request_that_they_are_of():
    draft = RequestInfo(id=2, token_ids=[1, 2, 9], prompt_length=2, draft_of=1)
    work = workload("rewound", [draft])
    assert [[request.id for request in batch] for batch in work.batches] == [[0], [1]]
    assert (work.drafts(REQUESTS[0]), work.drafts(REQUESTS[1])) == ([], [draft])
