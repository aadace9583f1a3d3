"""vLLM on two ranks, each in a process of its own: what they record is merged."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from harness.results.check import Outcome

from .test_check import check

pytestmark = pytest.mark.slow


def test_two_ranks_pass_with_every_tap(families):
    (run,) = check(families["llama"], schedules=["tensor-parallel"], max_new_tokens=6).runs
    assert (run.outcome, run.findings) == (Outcome.PASS, ())
    assert (run.coverage.missing, run.coverage.not_offered) == (0, ())
