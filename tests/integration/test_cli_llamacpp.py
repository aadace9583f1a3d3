"""`harness check --engine llamacpp`: every tap of llama.cpp under every schedule that it follows."""

import importlib.util

import pytest

from harness.checkpoint.gguf.writer import write_gguf
from harness.errors import Code

needs_llamacpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None or importlib.util.find_spec("gguf") is None,
    reason="llama-cpp-python is not installed (extra llamacpp; built from source, about ten minutes)",
)
PROMPTS = ["--token-ids", "1,20,21,22,23,24,25,26,27,28", "--token-ids", "1,30,31,9", "--token-ids", "5"]
PLAIN_CACHE = ["--engine-option", "cache_type=F32", "--engine-option", "flash_attention=off"]


@pytest.fixture
def check(harness, tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))

    def check(model, *options):
        workload = [*PROMPTS, "--max-new-tokens", 6]
        # In this process: a second one would take seconds to import torch.
        return harness("check", "--engine", "llamacpp", "--no-isolate", "--model", model, *workload, *options)

    return check


@needs_llamacpp
@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_float32_passes_every_tap_under_every_schedule(check, name, checkpoints, tmp_path):
    path = write_gguf(checkpoints / name, tmp_path / "model.gguf")
    schedules = "plain,chunked:3,batched,mixed:4,prefix-hit,forked"
    ran = check(path, *PLAIN_CACHE, "--schedule", schedules, "--format", "json")
    assert ran.status == 0, ran.out
    for run in ran.json["runs"]:
        assert run["coverage"]["missing"] == 0
        assert run["coverage"]["not_offered"] == []
        judged = {tap["site"] for tap in run["taps"] if tap["judged_by"] == "local"}
        assert {"self_attn.q_proj", "q_rope", "attention", "mlp.act", "output", "model.norm", "lm_head"} <= judged
        assert {"k_cache", "v_cache"} <= {tap["site"] for tap in run["taps"]}


@needs_llamacpp
def test_small_batches_of_its_own(check, checkpoints, tmp_path):
    path = write_gguf(checkpoints / "llama-tiny", tmp_path / "model.gguf")
    sizes = ["--engine-option", "batch_size=8", "--engine-option", "ubatch_size=3"]
    assert check(path, *PLAIN_CACHE, *sizes, "--schedule", "batched").status == 0


@needs_llamacpp
def test_a_checkpoint_that_is_no_gguf_is_converted(check):
    assert check("llama-tiny", *PLAIN_CACHE, "--schedule", "plain").status == 0


@needs_llamacpp
def test_a_rotary_base_of_the_engines_own_is_found_and_named(check, checkpoints, tmp_path):
    path = write_gguf(checkpoints / "qwen2-tiny", tmp_path / "model.gguf")
    ran = check(path, *PLAIN_CACHE, "--engine-option", "rope_freq_base=500000", "--schedule", "plain")
    assert ran.status == 1
    assert "First divergence: model.layers.0.q_rope" in ran.out
    assert "theta" in ran.out.partition("Cause:")[2]


@needs_llamacpp
def test_another_dtype_is_refused(check):
    ran = check("llama-tiny", "--dtype", "bfloat16")
    assert ran.status == 2
    assert ran.err.startswith(f"{Code.ENGINE_CANNOT_SERVE}: llama.cpp computes in float32")


@needs_llamacpp
def test_a_schedule_that_it_cannot_follow_is_refused(check):
    assert check("llama-tiny", "--schedule", "preempted").status == 2


def test_without_the_package(check, monkeypatch):
    from harness.engines.llamacpp import tensor

    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    tensor.llama.cache_clear()
    try:
        ran = check("llama-tiny")
    finally:
        tensor.llama.cache_clear()
    assert ran.status == 2
    assert ran.err.startswith(f"{Code.PACKAGE_MISSING}: the package llama-cpp-python is not installed")
