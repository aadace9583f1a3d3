"""vLLM in `harness bench engine`: it generates the reference engine's tokens, and is timed step by step beside it."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from harness.extensions.bench.run import run_bench

pytestmark = pytest.mark.slow


def test_vllm_is_timed_beside_the_reference_engine():
    result = run_bench(
        shape_name="tiny", dtype="float32", device="cpu", repeats=1, engine="vllm", peer_names=["reference"],
        engine_options={}, progress=lambda *_: None,
    )  # fmt: skip
    assert [(agreement.peer, agreement.num_requests) for agreement in result.agreements] == [("reference", 22)]
    for measure in result.measures:
        assert {peer: len(samples) for peer, samples in measure.samples.items()} == {"reference": 1, "vllm": 1}
