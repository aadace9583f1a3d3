"""An engine that records less: judged from the nearest taps that it did record."""

from fnmatch import fnmatchcase

import pytest
import torch

from harness.errors import Code
from harness.results.check import Outcome

LAYERS = ("model.embed_tokens", "*.output", "lm_head", "model.norm")
MODULES = (*LAYERS, "*layernorm", "*.o_proj", "*.attn_residual", "*.down_proj")


def keep(bench, patterns, schedule="mixed"):
    """A recording that holds only the taps that match, and their names."""
    copy = bench.recorded(schedule, engine="reference")
    names = [operation.tap for operation in bench.hf.graph]
    kept = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for name in names:
        if name not in kept:
            copy.drop(name)
    return copy, kept


def through(run):
    return {tap.name: len(tap.through) for tap in run.taps}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
@pytest.mark.parametrize("patterns", [LAYERS, MODULES])
def test_a_sound_engine_passes(bench, tmp_path, name, dtype, patterns):
    bench = bench(name, dtype)
    copy, kept = keep(bench, patterns)
    run = bench.compare(copy.write(tmp_path / "r"), wanted=kept)
    assert run.findings == ()
    assert {tap.judged_by for tap in run.taps} == {"local"}
    assert max(tap.local_bound_share_max for tap in run.taps) < 0.8


def test_the_finest_that_the_recording_allows(bench, tmp_path):
    bench = bench("llama-tiny")
    for patterns, expected in ((LAYERS, 14), (MODULES, 3)):
        copy, kept = keep(bench, patterns)
        found = through(bench.compare(copy.write(tmp_path / f"r{expected}"), wanted=kept))
        assert found["model.layers.1.output"] == (expected if patterns is LAYERS else 0)
        assert found["model.norm"] == found["lm_head"] == 0
    assert found["model.layers.1.mlp.down_proj"] == 3
    assert found["model.layers.1.self_attn.o_proj"] == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_wrong_layers_are_each_found_and_no_other(bench, tmp_path, dtype):
    bench = bench("qwen3-tiny", dtype)
    copy, kept = keep(bench, LAYERS)
    wrong = {"model.layers.0.output": (1, 3), "model.layers.2.output": (0, 6)}
    for tap, row in wrong.items():
        copy.at(tap, *row).add_(1.0)
    run = bench.compare(copy.write(tmp_path / "r"), wanted=kept)
    assert run.outcome is Outcome.MISMATCH
    bad = {tap.name for tap in run.taps if tap.num_bad_rows}
    assert {*wrong} <= bad
    assert bad <= {*wrong, "model.layers.1.output", "model.norm"}  # what reads a row that was changed after its maker
    assert (run.first_divergence.tap, run.first_divergence.position) == ("model.layers.0.output", 3)
    assert run.first_divergence.code is Code.LOCAL_ERROR
    message = next(finding.message for finding in run.findings if finding.tap == "model.layers.0.output")
    assert "computed through 16 taps that were not recorded" in message
