"""The reference engine's latent attention under the harness."""

from pathlib import Path

import pytest

import harness
from harness.engines.reference import open_engine
from harness.errors import Code, HarnessError

PROMPTS = [[3 + (7 * n * n + 11 * n) % 240 for n in range(38)], [3 + (5 * n * n + 3 * n) % 240 for n in range(23)]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_schedule_passes(dtype: str, checkpoints: Path) -> None:
    options = {"model": checkpoints / "deepseek-v3-tiny", "prompts": PROMPTS, "max_new_tokens": 10, "dtype": dtype}
    schedules = ["plain", "chunked", "batched", "mixed", "prefix-hit", "preempted", "forked", "rewound", "speculative"]
    harness.check("reference", **options, schedules=schedules, engine_options={"debug_checks": True}).assert_ok()


def test_what_it_offers_and_what_not(checkpoints: Path) -> None:
    engine = open_engine(checkpoints / "deepseek-v3-tiny", dtype="float32", device="cpu", options={})
    assert "tensor-parallel" not in engine.capabilities.schedules
    assert engine.capabilities.unsupported_taps == ("self_attn.kv_b_proj", "self_attn.key", "self_attn.value")
    with pytest.raises(HarnessError, match="the profiler has no cost formulas for latent attention") as caught:
        engine.open_session(max_num_tokens=64, max_num_seqs=1)  # type: ignore[attr-defined]
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE
