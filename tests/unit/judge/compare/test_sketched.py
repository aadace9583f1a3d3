"""A comparison with a golden that keeps sketches, against one with all values."""

from contextlib import nullcontext
from dataclasses import fields

import pytest
import torch

from harness.formats.recording import Recording
from harness.judge.compare import compare_run
from harness.judge.jobs.check import run_check
from harness.oracle.make_golden import cached_golden, make_golden
from harness.oracle.model import load_model
from harness.oracle.sketch import rows as sketches
from harness.results.check import Outcome
from harness.selfcheck.faults.catalogue import choose
from harness.selfcheck.faults.trial import checkpoint, plan_of

ESTIMATED = {"propagated_relative_l2_max", "propagated_ratio_median", "propagated_ratio_max", "sqnr_db_min"}
BY_ELEMENT = {"max_abs", "max_ulp"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_faulty", [False, True])
def test_verdicts_are_the_same(tmp_path, monkeypatch, is_faulty):
    """With the model and without it, where nothing but the distance to the golden judges."""
    monkeypatch.setattr(sketches, "PROJECTIONS_A_ROW", 24)
    monkeypatch.setattr(sketches, "_LEAST_WIDTH", 0)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    sketches._directions.cache_clear()
    (fault,) = choose(["norm-eps-too-large"])
    with checkpoint(fault.setting) as folder, fault.inject() if is_faulty else nullcontext():
        plan = plan_of(fault.setting, folder)
        found = run_check(plan, out=tmp_path / "out")
        hf = load_model(folder, dtype=torch.float32)
        whole, cached = make_golden(hf, plan.prompts, tmp_path / "whole"), cached_golden(hf, plan.prompts)
        (folder,) = (each for each in (tmp_path / "out").iterdir() if each.is_dir())
        for model in (hf, None):
            both = [compare_run(Recording.open(folder), golden, hf=model).result for golden in (whole, cached)]
            assert both[0].outcome is both[1].outcome is (Outcome.MISMATCH if is_faulty else Outcome.PASS)
            assert [(f.code, f.tap, f.request, f.position) for f in both[0].findings] == [
                (f.code, f.tap, f.request, f.position) for f in both[1].findings
            ]
            for theirs, ours in zip(both[0].taps, both[1].taps, strict=True):
                assert_alike(ours, theirs, is_sketch=ours.name in cached.sketched)
    assert found.runs[0].outcome is both[0].outcome
    sketches._directions.cache_clear()


def assert_alike(ours, theirs, *, is_sketch):
    for name in {field.name for field in fields(ours)} - {"worst", "first_bad", "cosine_min"}:
        actual, expected = getattr(ours, name), getattr(theirs, name)
        if is_sketch and name in BY_ELEMENT:
            assert actual is None
            assert expected is not None
        elif is_sketch and (name in ESTIMATED or (name == "num_bad_rows" and ours.judged_by == "propagated")):
            assert actual == pytest.approx(expected, rel=0.8)
        else:
            assert actual == expected, (ours.name, name)
