"""Bugs put into vLLM itself are found at their tap, and named."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from harness.results.check import Outcome

from .faults import FAULTS
from .test_check import check

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_bug_in_vllm_is_found_and_named(fault, monkeypatch):
    fault.inject(monkeypatch)
    (run,) = check("qwen3-tiny", schedules=[fault.schedule], max_new_tokens=24).runs
    assert run.outcome is Outcome.MISMATCH
    first = run.first_divergence
    explanation = run.findings[0].explanation if first is None else first.explanation
    assert ("tokens" if first is None else first.tap) == fault.tap
    assert fault.cause in explanation.cause
    assert explanation.is_cause
