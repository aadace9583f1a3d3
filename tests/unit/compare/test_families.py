"""HF itself, in its own dtype and through its own cache, is never called wrong: whatever the family."""

import pytest
import torch

from harness.compare import compare_run
from harness.oracle.make_golden import make_golden
from harness.oracle.requests import Prompt
from harness.results import Outcome, Verdict
from harness.taps import Kind

FAMILIES = (
    "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "mamba", "mistral", "mixtral", "phi3", "qwen2",
    "qwen3_moe", "llama4_text",
)  # fmt: skip
SCHEDULES = {torch.float32: "plain", torch.bfloat16: "batched", torch.float16: "chunked:3"}
SOUND = {Verdict.EXACT, Verdict.NOISE, Verdict.CONVENTION}


@pytest.mark.parametrize("dtype", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_hf_itself_is_sound(bench, tmp_path, family, dtype):
    one = bench(family, dtype)
    schedule = "plain" if family == "mamba" else SCHEDULES[dtype]  # HF's scan knows neither padding nor chunks
    wanted = [op.tap for op in one.hf.graph]
    run = one.compare(one.recorded(schedule).write(tmp_path / "r"), wanted=wanted)
    assert run.findings == ()
    assert run.outcome is Outcome.PASS
    assert {tap.verdict for tap in run.taps} <= SOUND
    assert [tap.name for tap in run.taps] == wanted
    assert {tap.judged_by for tap in run.taps} <= {"local", "cache"}
    assert run.coverage.missing == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_truth_put_back_into_itself_is_exact(bench, family):
    """No error model is asked: on the golden's own rows HF's forward differs by float64's rounding alone."""
    one = bench(family)
    run = one.compare(one.golden.recording, require=())
    choices = {op.tap for op in one.hf.graph if op.kind is Kind.CHOICE}
    assert run.findings == ()
    assert {tap.name for tap in run.taps} == {op.tap for op in one.hf.graph if op.kind is not Kind.CACHE}
    assert max(tap.local_roundings_max for tap in run.taps if tap.name not in choices) < 1e-5
    assert all(tap.verdict is Verdict.EXACT for tap in run.taps if tap.name in choices)


def test_requests_that_end_at_different_times_behind_a_window(bench, tmp_path):
    one = bench("gemma3_text")
    prompts = [Prompt(token_ids=tuple(range(3, 15)), max_new_tokens=count) for count in (1, 7)]
    golden = make_golden(one.hf, prompts, tmp_path / "golden")
    actual = one.run(golden.requests, "batched", tmp_path / "r")
    assert compare_run(actual, golden, hf=one.hf).result.findings == ()
