"""What a schedule leaves to its requests: which run together, and how many blocks they have."""

import pytest

from harness.engines import Workload
from harness.formats.recording import RequestInfo
from harness.formats.schedule import Schedule

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
