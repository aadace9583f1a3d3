"""HF itself, in its own dtype and through its own cache, is never called wrong: whatever the family."""

from itertools import product

import pytest
import torch

from harness.errors import Code
from harness.formats.taps import Kind
from harness.judge.compare import compare_run
from harness.oracle.make_golden import make_golden
from harness.oracle.requests import Prompt
from harness.results.check import Outcome, Verdict

FAMILIES = (
    "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "mamba", "mistral", "mixtral", "phi3", "qwen2",
    "qwen3_moe", "llama4_text",
)  # fmt: skip
SCHEDULES = {torch.float32: "plain", torch.bfloat16: "batched", torch.float16: "chunked:3"}
SOUND = {Verdict.EXACT, Verdict.NOISE, Verdict.CONVENTION}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("family", "dtype"), list(product(FAMILIES, SCHEDULES)))
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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_truth_put_back_into_itself_is_exact(bench, family):
    """No error model is asked: on the golden's own rows HF's forward differs by float64's rounding alone."""
    one = bench(family)
    run = one.compare(one.golden.recording, require=())
    choices = {op.tap for op in one.hf.graph if op.kind is Kind.CHOICE}
    assert run.findings == ()
    kept = (Kind.CACHE, Kind.STATE)  # of these the golden holds none
    assert {tap.name for tap in run.taps} == {op.tap for op in one.hf.graph if op.kind not in kept}
    assert max(tap.local_roundings_max for tap in run.taps if tap.name not in choices) < 1e-5
    assert all(tap.verdict is Verdict.EXACT for tap in run.taps if tap.name in choices)


def test_requests_that_end_at_different_times_behind_a_window(bench, tmp_path):
    one = bench("gemma3_text")
    prompts = [Prompt(token_ids=tuple(range(3, 15)), max_new_tokens=count) for count in (1, 7)]
    golden = make_golden(one.hf, prompts, tmp_path / "golden")
    actual = one.run(golden.requests, "batched", tmp_path / "r")
    assert compare_run(actual, golden, hf=one.hf).result.findings == ()


LATENT = "axk2"
"""Latent attention after an indexer that chooses the keys: its cache holds latents; in transformers 5.17 it holds keys
and values, which are not read back."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", SCHEDULES)
def test_latent_attention_is_sound(bench, tmp_path, dtype):
    one = bench(LATENT, dtype)
    actual = one.recorded(SCHEDULES[dtype])
    keeps_latents = any(step.phase == "readback" for step in actual.steps)
    wanted = [op.tap for op in one.hf.graph if keeps_latents or op.kind is not Kind.CACHE]
    run = one.compare(actual.write(tmp_path / "r"), wanted=wanted)
    assert run.findings == ()
    assert run.outcome is Outcome.PASS
    assert [tap.name for tap in run.taps] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_values_that_were_joined_in_another_order(bench, tmp_path, dtype):
    """A copy makes no rounding, and what reads it is judged on what it was given."""
    one, name = bench(LATENT, dtype), "model.layers.1.self_attn.q_gate_proj.input"
    actual = one.recorded()
    for step in actual.computing():
        step.taps[name] = torch.cat(step.taps[name].chunk(2, dim=-1)[::-1], dim=-1)
    run = one.compare(actual.write(tmp_path / "r"))
    assert (run.first_divergence.tap, run.first_divergence.code) == (name, Code.LOCAL_ERROR)
    (joined,) = (tap for tap in run.taps if tap.name == name)
    assert joined.num_bad_rows == joined.num_rows
    assert {tap.name for tap in run.taps if tap.verdict is Verdict.BUG} == {name, name.removesuffix(".input")}
