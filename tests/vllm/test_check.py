"""Unmodified vLLM passes in every family, dtype and schedule that it serves, with every tap and its cache read back."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from harness.errors import Code, HarnessError
from harness.extensions.vllm.opening import base_arguments
from harness.formats.case import RequestSpec
from harness.judge.jobs.check import run_check
from harness.plan import plan_request
from harness.results.check import Outcome

from .conftest import FAMILIES, write_checkpoint

pytestmark = pytest.mark.slow
PROMPTS = [list(range(3, 50)), list(range(60, 71)), list(range(100, 142))]
"""Beyond a block of 32, short, and beyond a block by what is made."""
EVERY = ["plain", "chunked", "batched", "mixed", "prefix-hit", "preempted"]


def check(model, dtype="float32", schedules=("plain",), max_new_tokens=30, **options):
    plan = plan_request(
        model=str(model),
        engine="vllm",
        isolate=False,
        dtype=dtype,
        requests=[RequestSpec(token_ids=ids) for ids in PROMPTS],
        schedules=schedules,
        max_new_tokens=max_new_tokens,
        **options,
    )
    return run_check(plan)


SERVED = [(family, dtype) for family in FAMILIES for dtype in ("float32", "float16")]
SERVED.remove(("gemma3_text", "float16"))


@pytest.mark.parametrize(("family", "dtype"), SERVED)
def test_vllm_passes(families, family, dtype):
    result = check(families[family], dtype, EVERY)
    assert [(str(run.schedule), run.outcome, run.findings) for run in result.runs] == [
        (schedule, Outcome.PASS, ()) for schedule in EVERY
    ]
    for run in result.runs:
        assert (run.coverage.missing, tuple(run.coverage.not_offered)) == (0, ())
        cached = {tap.name for tap in run.taps if tap.judged_by == "cache"}
        assert len(cached) == 2 * 3, "keys and values of three layers"


def test_a_router_that_computes_its_softmax_in_float16_is_found(tmp_path):
    """On a CPU, where weights of experts are not normalised: see reports/cpu/vllm_deviations.py."""
    folder = write_checkpoint("qwen3_moe", tmp_path, norm_topk_prob=False)
    (run,) = check(folder, "float16", max_new_tokens=3).runs
    assert {(finding.code, finding.tap) for finding in run.findings} == {
        (Code.LOCAL_ERROR, f"model.layers.{layer}.mlp.gate.1") for layer in range(3)
    }


def test_the_note_has_the_options_that_were_given(families):
    result = check(families["llama"], max_new_tokens=2, engine_options={"block_size": "64"})
    assert any("block_size=64" in note for note in result.notes)


def test_a_cache_without_a_size_gets_vllms_own_share_of_the_memory(families):
    assert "gpu_memory_utilization" in base_arguments(families["llama"], "float32", {})
    assert "gpu_memory_utilization" not in base_arguments(families["llama"], "float32", {"kv_cache_memory_bytes": None})


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ({"block_size": "7"}, Code.ENGINE_CANNOT_SERVE, "block"),
        ({"no_such_field": "7"}, Code.BAD_OPTION, "no_such_field"),
        ({"dtype": "float16"}, Code.BAD_OPTION, "--dtype"),
        ({"kv_cache_memory_bytes": str(1 << 50)}, Code.ENGINE_CANNOT_SERVE, "memory"),
        (
            {"num_gpu_blocks_override": str(10**13)},
            Code.ENGINE_CANNOT_SERVE,
            "can't allocate memory",
        ),  # no machine has it
    ],
)
def test_options_that_vllm_refuses(families, monkeypatch, options, code, says):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # vLLM takes it before an option
    with pytest.raises(HarnessError) as caught:
        check(families["llama"], engine_options=options)
    assert caught.value.code is code
    assert says in str(caught.value)


def test_a_dtype_that_vllm_refuses_is_said_in_its_own_words(families):
    with pytest.raises(HarnessError) as caught:
        check(families["gemma3_text"], "float16")
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE
    assert "'gemma3_text' does not support float16. Reason: Numerical instability" in caught.value.what


def test_a_head_size_that_vllm_refuses(tmp_path):
    with pytest.raises(HarnessError) as caught:
        check(write_checkpoint("llama", tmp_path, head_dim=16))
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE
    assert "head" in str(caught.value)


def test_fields_of_engine_args_are_options(families):
    (run,) = check(families["llama"], schedules=["batched"], engine_options={"block_size": "64"}).runs
    assert run.outcome is Outcome.PASS


def test_a_compiled_model_shows_its_cache_and_logits(families):
    options = {"enforce_eager": "false"}
    (run,) = check(families["llama"], max_new_tokens=6, engine_options=options, only="cache").runs
    assert (run.outcome, run.findings) == (Outcome.PASS, ())
    caches = {f"model.layers.{layer}.{part}_cache" for layer in range(3) for part in "kv"}
    assert {tap.name for tap in run.taps if tap.judged_by != "none"} == {*caches, "lm_head"}
