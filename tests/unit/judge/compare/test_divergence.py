"""The first divergence: the earliest operation that is wrong, by its values or by a shape that cannot be judged."""

import pytest
import torch

from harness.errors import Code
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.judged import first_divergence
from harness.judge.compare.shapes import check_taps
from harness.results.check import Effect, Outcome, Verdict

from .in_memory import Step, recording_of
from .judgements import errors_of, judgement, propagated_of

EARLY, MIDDLE, LATE = (f"model.layers.1.{site}" for site in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"))
ROW = (2, 5)


def misshape(actual, tap):
    """Leave half of each row out."""
    for step in actual.computing():
        if tap in step.taps:
            step.taps[tap] = step.taps[tap][..., ::2]


def in_brief(result):
    first = result.first_divergence
    return first and (first.tap, first.code)


def test_a_tap_of_another_shape_is_where_it_begins(one, actual, tmp_path):
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
def test_what_comes_first_in_the_run_is_first(one, actual, tmp_path, wrong, expected):
    """Whichever of the two was recorded first, and in whatever row it is wrong."""
    misshape(actual, MIDDLE)
    actual.at(wrong, *ROW).mul_(2)
    for step in actual.steps:
        step.taps = dict(reversed(step.taps.items()))
    assert in_brief(one.compare(actual.write(tmp_path / "r"))) == expected


def test_of_several_shapes_the_first_in_the_run(one, actual, tmp_path):
    for tap in (LATE, MIDDLE, "lm_head"):
        misshape(actual, tap)
    for step in actual.steps:
        step.taps = dict(reversed(step.taps.items()))
    assert in_brief(one.compare(actual.write(tmp_path / "r"))) == (MIDDLE, Code.TAP_MISMATCH)


def test_a_shape_is_first_without_replay_too(one, actual, tmp_path):
    """Where rows are held against the golden's."""
    misshape(actual, MIDDLE)
    for step in actual.computing():
        step.taps[LATE] = step.taps[LATE] * 1.5
    assert in_brief(one.measure(actual.write(tmp_path / "r"))) == (MIDDLE, Code.TAP_MISMATCH)


def test_under_another_name_it_is_the_same_tap(one, actual, tmp_path):
    """HF's own name of an alias: the recording is read under the graph's."""
    prefix = "model.layers.1."
    misshape(actual, f"{prefix}mlp.act")
    for step in actual.computing():
        step.taps[f"{prefix}mlp.down_proj.input"] = step.taps.pop(f"{prefix}mlp.act")
    assert in_brief(one.compare(actual.write(tmp_path / "r"))) == (f"{prefix}mlp.act", Code.TAP_MISMATCH)


def test_a_tap_that_the_graph_does_not_know_is_no_operation(one, actual, tmp_path):
    """It is a finding, and nothing can be said of where it stands."""
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


def test_a_tap_without_any_row(one, actual, tmp_path):
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


# By hand: the order of the graph, and the row that is told.

GRAPH = Graph(tuple(Operation(tap=tap, kind=Kind.ADD) for tap in ("a", "b", "c")))
STEPS = [
    Step([(0, 0)], phase="prefill", taps={"c": torch.zeros(1, 1)}),
    Step([(7, 1), (2, 5), (2, 3)], phase="decode", taps={"b": torch.zeros(2, 1)}, rows_of={"b": [1, 2]}),
    Step([(9, 0)], phase="mixed", taps={"b": torch.zeros(1, 1), "a": torch.zeros(0, 1)}, rows_of={"a": []}),
    Step([(9, 1)], phase="late", taps={}),
]
BAD, SOUND = (9.0, 3.0, 4.0, 0.5), (1.0, 0.0, 0.0, 0.5)


def first(judged, misshapen=()):
    divergence = first_divergence(judged, misshapen, GRAPH, recording_of({0: range(9)}, STEPS))
    return divergence and (
        divergence.tap,
        divergence.request,
        divergence.position,
        divergence.step,
        divergence.phase,
        divergence.code,
    )


def test_the_first_wrong_operation_at_its_first_bad_row():
    judged = [
        judgement(errors_of(SOUND), tap="a"),
        judgement(errors_of(BAD), tap="b"),
        judgement(errors_of(BAD), tap="c"),
    ]
    divergence = first_divergence(judged, [], GRAPH, recording_of({0: range(9)}, STEPS))
    assert (divergence.tap, divergence.request, divergence.position, divergence.step, divergence.phase) == (
        "b",
        2,
        3,
        2,
        "mixed",
    )
    assert (divergence.local_roundings, divergence.bound_roundings, divergence.propagated_ratio) == (4.0, 2.0, None)
    assert (divergence.verdict, divergence.code, divergence.schedule) == (Verdict.BUG, Code.LOCAL_ERROR, "by hand")


def test_a_direction_of_all_rows_is_reported_at_the_first_row():
    effect = Effect(kind="gain", which="", size=1.0, low=0.9, high=1.1, roundings=3.0, statistic=20.0, num_rows=50)
    propagated = propagated_of([5.0, 6.0, 7.0, 8.0])
    judged = judgement(errors_of(SOUND, effect=effect), propagated=propagated, tap="b")
    divergence = first_divergence([judged], [], GRAPH, recording_of({0: range(9)}, STEPS))
    assert (divergence.request, divergence.position, divergence.local_roundings, divergence.propagated_ratio) == (
        2,
        3,
        0.0,
        7.0,
    )
    assert (divergence.verdict, divergence.code) == (Verdict.SYSTEMATIC, Code.SYSTEMATIC_ERROR)


def test_a_distance_to_the_golden_has_no_roundings():
    judged = judgement(propagated=propagated_of([99.0, 1.0, 1.0, 1.0]), tap="c")
    divergence = first_divergence([judged], [], GRAPH, recording_of({0: range(9)}, STEPS))
    assert (
        divergence.request,
        divergence.local_roundings,
        divergence.bound_roundings,
        divergence.propagated_ratio,
    ) == (
        7,
        None,
        None,
        99.0,
    )


@pytest.mark.parametrize(
    ("wrong", "misshapen", "expected"),
    [
        ("c", ["b"], ("b", 2, 5, 1, "decode", Code.TAP_MISMATCH)),
        ("c", ["c", "b"], ("b", 2, 5, 1, "decode", Code.TAP_MISMATCH)),
        ("a", ["b"], ("a", 2, 3, 2, "mixed", Code.LOCAL_ERROR)),
        ("b", ["b"], ("b", 2, 3, 2, "mixed", Code.LOCAL_ERROR)),
        ("c", ["a"], ("c", 2, 3, 2, "mixed", Code.LOCAL_ERROR)),
        ("unknown", ["c"], ("c", 0, 0, 0, "prefill", Code.TAP_MISMATCH)),
        ("c", ["unknown"], ("c", 2, 3, 2, "mixed", Code.LOCAL_ERROR)),
        (None, ["c"], ("c", 0, 0, 0, "prefill", Code.TAP_MISMATCH)),
        (None, ["a"], None),
        (None, ["unknown"], None),
    ],
)
def test_a_shape_or_values_whichever_comes_first(wrong, misshapen, expected):
    """A shape without any row, of `a` here, says nothing of a row."""
    assert first([] if wrong is None else [judgement(errors_of(BAD), tap=wrong)], misshapen) == expected
