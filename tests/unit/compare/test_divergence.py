"""The first divergence: the earliest operation that is wrong, by its values or by a shape that cannot be judged."""

import pytest
import torch

from harness.compare.divergence import first_divergence
from harness.compare.shapes import check_taps
from harness.errors import Code
from harness.results import Outcome, Verdict

EARLY, MIDDLE, LATE = (f"model.layers.1.{site}" for site in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"))
ROW = (2, 5)


@pytest.fixture
def one(bench):
    return bench()


def misshape(actual, tap):
    """Leave half of each row out."""
    for step in actual.computing():
        if tap in step.taps:
            step.taps[tap] = step.taps[tap][..., ::2]


def in_brief(result):
    first = result.first_divergence
    return first and (first.tap, first.code)


def test_a_tap_of_another_shape_is_where_it_begins(one, tmp_path):
    actual = one.recorded()
    misshape(actual, MIDDLE)
    result = one.compare(actual.write(tmp_path / "r"))
    first, step = result.first_divergence, actual.steps[0]
    assert (first.tap, first.code, first.verdict) == (MIDDLE, Code.TAP_MISMATCH, Verdict.BUG)
    assert (first.request, first.position) == (step.request[0], step.position[0])
    assert (first.step, first.phase, first.schedule) == (0, step.phase, "batched")
    assert (first.local_roundings, first.bound_roundings, first.propagated_ratio) == (None, None, None)
    assert Code.TAP_MISMATCH in {finding.code for finding in result.findings}
    assert result.outcome is Outcome.MISMATCH


def test_a_tap_of_a_coarser_dtype_is_where_it_begins(bench, tmp_path):
    actual = bench().recorded()
    for step in actual.computing():
        step.taps[MIDDLE] = step.taps[MIDDLE].bfloat16()
    assert in_brief(bench().compare(actual.write(tmp_path / "r"))) == (MIDDLE, Code.TAP_MISMATCH)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (EARLY, (EARLY, Code.LOCAL_ERROR)),
        (LATE, (MIDDLE, Code.TAP_MISMATCH)),
    ],
)
def test_what_comes_first_in_the_run_is_first(one, tmp_path, wrong, expected):
    """Whichever of the two was recorded first, and in whatever row it is wrong."""
    actual = one.recorded()
    misshape(actual, MIDDLE)
    actual.at(wrong, *ROW).mul_(2)
    for step in actual.steps:
        step.taps = dict(reversed(step.taps.items()))
    assert in_brief(one.compare(actual.write(tmp_path / "r"))) == expected


def test_of_several_shapes_the_first_in_the_run(one, tmp_path):
    actual = one.recorded()
    for tap in (LATE, MIDDLE, "lm_head"):
        misshape(actual, tap)
    for step in actual.steps:
        step.taps = dict(reversed(step.taps.items()))
    assert in_brief(one.compare(actual.write(tmp_path / "r"))) == (MIDDLE, Code.TAP_MISMATCH)


def test_a_shape_is_first_without_replay_too(one, tmp_path):
    """Where rows are held against the golden's."""
    actual = one.recorded()
    misshape(actual, MIDDLE)
    for step in actual.computing():
        step.taps[LATE] = step.taps[LATE] * 1.5
    assert in_brief(one.measure(actual.write(tmp_path / "r"))) == (MIDDLE, Code.TAP_MISMATCH)


def test_under_another_name_it_is_the_same_tap(one, tmp_path):
    """HF's own name of an alias: the recording is read under the graph's."""
    prefix = "model.layers.1."
    actual = one.recorded()
    misshape(actual, f"{prefix}mlp.act")
    for step in actual.computing():
        step.taps[f"{prefix}mlp.down_proj.input"] = step.taps.pop(f"{prefix}mlp.act")
    assert in_brief(one.compare(actual.write(tmp_path / "r"))) == (f"{prefix}mlp.act", Code.TAP_MISMATCH)


def test_a_tap_that_the_graph_does_not_know_is_no_operation(one, tmp_path):
    """It is a finding, and nothing can be said of where it stands."""
    actual = one.recorded()
    for step in actual.computing():
        step.taps["mine"] = torch.zeros(len(step.request), 3, dtype=torch.int64)
    result = one.compare(actual.write(tmp_path / "r"))
    assert [(finding.code, finding.tap) for finding in result.findings] == [(Code.TAP_MISMATCH, "mine")]
    assert result.first_divergence is None


def test_its_first_row_is_that_of_the_first_step_that_has_it(one, tmp_path):
    """A head that is computed where tokens are sampled, and in no step before that."""
    actual = one.recorded("chunked:3")
    misshape(actual, "lm_head")
    first = one.compare(actual.write(tmp_path / "r")).first_divergence
    at = next(at for at, step in enumerate(actual.steps) if "lm_head" in step.taps)
    step = actual.steps[at]
    row = step.rows_of["lm_head"][0]
    assert at > 0
    assert row > 0
    assert (first.tap, first.code, first.step) == ("lm_head", Code.TAP_MISMATCH, at)
    assert (first.request, first.position) == (step.request[row], step.position[row])


def test_a_step_with_no_row_of_it_is_passed_over(one, tmp_path):
    """An engine may write an empty tensor where it sampled nothing."""
    actual = one.recorded("chunked:3")
    misshape(actual, "lm_head")
    empty, there = actual.steps[0], next(step for step in actual.steps if "lm_head" in step.taps)
    empty.rows_of["lm_head"], empty.taps["lm_head"] = [], there.taps["lm_head"][:0]
    first = one.compare(actual.write(tmp_path / "r")).first_divergence
    assert (first.tap, first.step) == ("lm_head", actual.steps.index(there))


def test_a_tap_without_any_row(one, tmp_path):
    actual = one.recorded()
    misshape(actual, "lm_head")
    for step in actual.computing():
        if "lm_head" in step.taps:
            step.rows_of["lm_head"], step.taps["lm_head"] = [], step.taps["lm_head"][:0]
    result = one.compare(actual.write(tmp_path / "r"))
    assert {Code.TAP_MISMATCH, Code.ROWS_MISSING} <= {finding.code for finding in result.findings}
    assert result.first_divergence is None, "there is no row to name"


def test_nothing_is_wrong(one):
    recording, graph = one.golden.recording, one.hf.graph
    assert check_taps(recording, recording, graph)[0] == []
    assert first_divergence([], [], graph, recording) is None
