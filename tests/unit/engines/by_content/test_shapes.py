"""However an engine lays out the rows of its steps, all of its taps are judged, and a mistake is found at its row."""

from itertools import product

import pytest
import torch

import harness
from harness.engines.by_content import StepEngine
from harness.errors import Code
from harness.results.check import Outcome

from .engine_shapes import (
    AT,
    MISTAKES,
    SHAPES,
    Chunks,
    ColumnsFirst,
    InThreads,
    OtherModulesForMany,
    OtherModulesForOne,
    PaddedLeft,
    PaddedRight,
    ShortestFirstAfterLookup,
)

OF_BOTH_THREADS = InThreads, "attention "
"""This mistake replaces a function of torch's for a moment, in whichever thread calls it then."""
FOLDER = "qwen2-tiny"
PROMPTS = [[5, 5, 9, 5, 5, 9, 0, 5, 5, 9, 5, 0], [5, 5, 9, 5, 7, 7, 7, 30], [0, 0, 3, 5, 5, 9, 5]]
"""Equal beginnings, equal tokens, and tokens that are padding in other rows."""


def check(engine, folder, dtype=torch.float32, schedules=("batched",), prompts=PROMPTS):
    name = str(dtype).removeprefix("torch.")
    adapter = StepEngine(lambda: engine, name="shape", folder=folder, dtype=name)
    return harness.check(adapter, model=folder, prompts=prompts, max_new_tokens=3, schedules=schedules, dtype=name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in SHAPES),
        *product(SHAPES, (torch.bfloat16, torch.float16)),
    ],
)
def test_a_sound_engine_passes_with_all_taps(checkpoints, shape, dtype):
    schedules = ["batched"] if shape in (PaddedLeft, PaddedRight) else ["batched", "mixed:5"]
    report = check(shape(checkpoints / FOLDER, dtype), checkpoints / FOLDER, dtype, schedules)
    assert report.is_ok, report.text()
    for run in report.runs:
        assert len(run.taps) == 48
        assert run.coverage.rows_ambiguous <= 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("shape", "site"), [pair for pair in product(SHAPES, MISTAKES) if pair != OF_BOTH_THREADS])
def test_a_mistake_is_found_at_its_operation_and_row(checkpoints, shape, site):
    engine = shape(checkpoints / FOLDER)
    MISTAKES[site](engine)
    (run,) = check(engine, checkpoints / FOLDER).runs
    first = run.first_divergence
    assert (first.tap, first.request, first.position) == (f"model.layers.1.{site.strip()}", 0, AT)


def test_rows_are_followed_where_lines_are_turned(checkpoints):
    engine = ColumnsFirst(checkpoints / FOLDER)
    (run,) = check(engine, checkpoints / FOLDER).runs
    assert (run.findings, len(run.taps), run.coverage.missing) == ((), 48, 0)
    MISTAKES["mlp.act"](engine)
    (run,) = check(engine, checkpoints / FOLDER).runs
    first = run.first_divergence
    assert (first.tap, first.request, first.position) == ("model.layers.1.mlp.act", 0, AT)


def test_rows_that_are_reordered_after_the_lookup_are_not_judged(checkpoints):
    report = check(ShortestFirstAfterLookup(checkpoints / FOLDER), checkpoints / FOLDER)
    assert report.is_ok
    assert "another order than the token ids" in " ".join(report.text().split())


def test_modules_that_run_for_one_request_alone_are_judged_alone(checkpoints):
    (run,) = check(OtherModulesForOne(checkpoints / FOLDER), checkpoints / FOLDER, schedules=["plain"]).runs
    assert (run.findings, len(run.taps), run.coverage.missing) == ((), 48, 0)


@pytest.mark.parametrize(("scale", "is_ok"), [(1.0, True), (1.02, False)])
def test_the_golden_judges_what_was_computed_from_rows_that_are_not_judged(checkpoints, scale, is_ok):
    engine = OtherModulesForMany(checkpoints / FOLDER, scale=scale)
    (run,) = check(engine, checkpoints / FOLDER, schedules=["plain"], prompts=[[*range(20, 60)], PROMPTS[2]]).runs
    assert run.coverage.rows_ambiguous == 40
    assert (run.coverage.judged_compute, round(run.coverage.judged_compute_of_rows, 2)) == (1, 0.28)
    assert (run.outcome is Outcome.PASS) is is_ok
    wrong_taps = [finding.tap for finding in run.findings if finding.code is Code.PROPAGATED_ERROR]
    assert wrong_taps[:1] == ([] if is_ok else ["model.layers.2.attention"])


class RepeatsFirstChunk(Chunks):
    """Gives each chunk the tokens of the first one."""

    def step(self, work):
        def wrong(tokens):
            return [tokens[at % self.size] if len(tokens) > self.size else token for at, token in enumerate(tokens)]

        return super().step([(request, wrong(tokens), first) for request, tokens, first in work])


def test_a_wrong_token_keeps_its_row(checkpoints):
    (run,) = check(RepeatsFirstChunk(checkpoints / FOLDER), checkpoints / FOLDER, schedules=["plain"]).runs
    first = run.first_divergence
    assert (first.tap, first.request, first.position) == ("model.embed_tokens", 0, 5)
