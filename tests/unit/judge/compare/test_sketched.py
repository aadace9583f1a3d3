"""A comparison with a golden that keeps sketches, against one with all values."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace

import pytest
import torch

from harness.formats.recording import Recording
from harness.judge.compare import compare_run
from harness.judge.explain import explain_run
from harness.judge.jobs.check import run_check
from harness.oracle import sketch_rows as sketches
from harness.oracle.make_golden import cached_golden, make_golden
from harness.oracle.model import load_model
from harness.oracle.requests import Prompt
from harness.results.check import Outcome

from .conftest import NUM_NEW

pytest.importorskip("harness.extensions.faults", reason="the catalogue of faults is an extension")
from harness.extensions.faults.catalogue import choose
from harness.extensions.faults.subject import checkpoint, plan_of

CACHE, CACHE_INPUT = "model.layers.1.k_cache", "model.layers.1.k_rope"
ESTIMATED = {"propagated_relative_l2_max", "propagated_ratio_median", "propagated_ratio_max", "sqnr_db_min"}
BY_ELEMENT = {"max_abs", "max_ulp"}


@pytest.fixture(autouse=True)
def narrow(one, monkeypatch, tmp_path) -> Iterator[None]:
    """Let rows of tiny models be sketched, in a cache of the test's own; that of `one` is made before."""
    monkeypatch.setattr(sketches, "PROJECTIONS_A_ROW", 24)
    monkeypatch.setattr(sketches, "_LEAST_WIDTH", 0)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    sketches._directions.cache_clear()
    yield
    sketches._directions.cache_clear()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_faulty", [False, True])
def test_verdicts_are_the_same(tmp_path, is_faulty):
    """With the model and without it, where nothing but the distance to the golden judges."""
    (fault,) = choose(["norm-eps-too-large"])
    with checkpoint(fault.setting) as folder, fault.inject() if is_faulty else nullcontext():
        plan = plan_of(fault.setting, folder)
        result = run_check(plan, out=tmp_path / "out")
        hf = load_model(folder, dtype=torch.float32)
        whole, cached = make_golden(hf, plan.prompts, tmp_path / "whole"), cached_golden(hf, plan.prompts)
        (folder,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir() and path.name != "culprit")
        for model in (hf, None):
            both = [compare_run(Recording.open(folder), golden, hf=model).result for golden in (whole, cached)]
            assert both[0].outcome is both[1].outcome is (Outcome.MISMATCH if is_faulty else Outcome.PASS)
            assert [(f.code, f.tap, f.request, f.position) for f in both[0].findings] == [
                (f.code, f.tap, f.request, f.position) for f in both[1].findings
            ]
            for theirs, ours in zip(both[0].taps, both[1].taps, strict=True):
                assert_alike(ours, theirs, is_sketch=ours.name in cached.sketched)
    assert result.runs[0].outcome is both[0].outcome


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda row: row, None),
        (lambda row: row.mul_(2), "what comes back is that with a gain of 2"),
        (lambda row: row.zero_(), "zeros come back: never written, or written over with zeros"),
    ],
)
def test_a_cache_whose_writing_was_not_recorded_is_judged_and_explained_as_by_all_values(one, tmp_path, spoil, cause):
    """What it was to hold is computed again, where an explanation needs it."""
    recording = one.recorded("prefix-hit", engine="reference")
    for tap in (CACHE_INPUT, "model.layers.1.self_attn.v_proj"):
        recording.drop(tap)
    for step in recording.steps:
        if step.phase == "readback" and CACHE in step.taps:
            spoil(step.taps[CACHE][1:])
    actual = recording.write(tmp_path / "engine")
    prompts = [
        Prompt(token_ids=tuple(request.token_ids[: request.prompt_length]), max_new_tokens=NUM_NEW)
        for request in one.golden.requests
    ]
    whole, cached = make_golden(one.hf, prompts, tmp_path / "whole"), cached_golden(one.hf, prompts)
    assert CACHE_INPUT in cached.sketched
    runs = [explain_run(compare_run(actual, golden, hf=one.hf), actual, golden, one.hf) for golden in (whole, cached)]
    (theirs, ours) = ([(f.code, f.tap, f.position) for f in run.findings] for run in runs)
    assert ours == theirs
    (theirs, ours) = ([f.explanation for f in run.findings if f.tap == CACHE] for run in runs)
    assert [our.cause for our in ours] == ([] if cause is None else [cause])
    assert [replace(our, residual_before=0.0) for our in ours] == [
        replace(their, residual_before=0.0) for their in theirs
    ]


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
