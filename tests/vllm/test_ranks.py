"""vLLM on two ranks, each in a process of its own: what they record is merged, and a wrong rank is found."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from harness.results import Outcome

from .faults import wrapped
from .test_check import check

pytestmark = pytest.mark.slow


def test_two_ranks_pass_with_every_tap(families):
    (run,) = check(families["llama"], schedules=["tensor-parallel"], max_new_tokens=6).runs
    assert (run.outcome, run.findings) == (Outcome.PASS, ())
    assert (run.coverage.missing, run.coverage.not_offered) == (0, ())


def test_a_bug_of_one_rank_is_found_in_its_heads(families, monkeypatch):
    """The workers are forks of this process: they have the bug, too."""

    def forward(before, self, positions, *rest, **named):
        return before(self, positions + get_tensor_model_parallel_rank(), *rest, **named)

    wrapped(monkeypatch, RotaryEmbedding, "forward", forward)
    (run,) = check(families["llama"], schedules=["tensor-parallel"], max_new_tokens=6).runs
    assert run.outcome is Outcome.MISMATCH
    assert run.first_divergence.tap == "model.layers.0.q_rope"
    worst = next(tap.worst for tap in run.taps if tap.name == "model.layers.0.q_rope")
    assert worst.index >= 3 * 32, "of the six heads, rank 1 has the last three"
