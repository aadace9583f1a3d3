"""The rows of the table, and how results merge."""

import math
from dataclasses import dataclass, fields, replace
from typing import Annotated

import pytest

from harness.report.check.table import (
    MAX_FOLDED_ROWS,
    Role,
    merge,
    merge_taps,
    sections,
    sum_coverage,
    sum_seconds,
    sum_tokens,
    table_rows,
)
from harness.results.check import Coverage, TapResult, Verdict
from harness.results.merging import TOTAL, mergeable, merged

from .examples import NUM_ROWS, broken, build, check, missing_run, sound_run, wrong_run


def test_a_sound_check_has_one_row_per_operation():
    rows = table_rows(sound_run(num_layers=80).taps, None)
    assert len(rows) == 1 + 19 + 2
    assert {row.layers for row in rows} == {"", "0-79"}
    assert {row.role for row in rows} == {Role.SOUND}


def test_the_layer_of_the_culprit_is_expanded_and_all_others_are_folded():
    rows = table_rows(wrong_run().taps, "model.layers.20.q_rope")
    assert [row.layers for row in rows] == ["", "0-19", *["20"] * 19, "21-39", "21-39", "", ""]
    assert [row.label for row in rows if row.role is Role.CULPRIT] == ["q_rope"]
    at = next(index for index, row in enumerate(rows) if row.role is Role.CULPRIT)
    assert {row.role for row in rows[:at]} == {Role.SOUND}
    assert {row.remark for row in rows[at + 1 :]} == {"downstream", "bug in 19 taps"}


def test_the_culprit_may_be_outside_of_the_layers():
    run = sound_run()
    taps = (*run.taps[:-1], broken(run.taps[-1], 50.0))
    rows = table_rows(taps, "lm_head")
    assert (rows[-1].label, rows[-1].role, rows[-1].remark) == ("lm_head", Role.CULPRIT, "bug in 37 rows")
    assert len(rows) == 22


def test_many_wrong_operations_behind_the_culprit_take_few_rows():
    taps = tuple(broken(tap, 50.0) if (tap.layer or 0) >= 20 else tap for tap in sound_run(num_layers=80).taps)
    rows = table_rows(taps, "model.layers.20.input_layernorm")
    folded = [row for row in rows if row.layers == "21-79"]
    assert len(folded) == MAX_FOLDED_ROWS + 1
    assert folded[-1].label == "13 more operations"


def test_a_sound_operation_with_a_small_propagated_error_is_not_downstream():
    run = wrong_run()
    taps = tuple(replace(tap, propagated_ratio_max=1.1) for tap in run.taps)
    assert Role.DOWNSTREAM not in {row.role for row in table_rows(taps, "model.layers.20.q_rope")}


def test_what_is_not_finite_is_counted_in_the_remark():
    rows = table_rows(build("nan").runs[0].taps, "model.layers.20.q_rope")
    assert [row.remark for row in rows if row.role is Role.CULPRIT] == ["bug, 12 NaN"]


def test_a_missing_tap_shows_in_the_row_of_its_operation():
    rows = {row.label: row for row in table_rows(build("missing").runs[0].taps, None)}
    assert rows["attention"].remark == "missing in 1 tap"
    assert rows["attention"].role is Role.MISSING


def test_schedules_that_show_the_same_share_a_section():
    runs = (sound_run(num_layers=40), wrong_run("a"), wrong_run("b"), wrong_run("c", layer=3))
    assert [section.schedules for section in sections(check(*runs))] == ["plain", "a, b", "c"]


def test_the_worst_verdict_of_the_layers_is_shown():
    run = sound_run()
    taps = tuple(replace(tap, verdict=Verdict.CONVENTION) if tap.layer == 1 else tap for tap in run.taps)
    assert {row.remark for row in table_rows(taps, None) if row.layers} == {"convention"}


def tap(**fields: object) -> TapResult:
    base = {"name": "t", "site": "t", "layer": 0, "kind": "linear", "num_rows": 10, "verdict": Verdict.NOISE}
    return TapResult(**(base | fields))  # type: ignore[arg-type]


def test_counts_are_summed_and_errors_are_the_largest():
    merged = merge(
        [
            tap(local_roundings_max=1.5, cosine_min=0.9, num_nan=1),
            tap(local_roundings_max=2.5, cosine_min=0.8, num_nan=2, num_rows=5),
        ]
    )
    assert (merged.num_rows, merged.num_nan) == (15, 3)
    assert (merged.local_roundings_max, merged.cosine_min) == (2.5, 0.8)


def test_nan_is_the_largest_error_and_none_is_no_error():
    assert math.isnan(merge([tap(max_abs=math.nan), tap(max_abs=9.0)]).max_abs or 0.0)
    assert merge([tap(max_abs=None), tap(max_abs=9.0)]).max_abs == 9.0
    assert merge([tap(), tap()]).max_abs is None


def test_the_verdict_and_its_place_are_those_of_the_worst():
    bug = tap(name="bug", verdict=Verdict.BUG, judged_by="local")
    assert merge([tap(verdict=Verdict.MISSING), bug, tap(verdict=Verdict.EXACT)]) == merge([bug, tap(num_rows=20)])


@pytest.mark.parametrize(
    ("parts", "median"),
    [
        ([(1.0, 10), (2.0, 10)], 2.0),
        ([(1.0, 11), (2.0, 10)], 1.0),
        ([(1.0, 1), (2.0, 9), (3.0, 1)], 2.0),
        ([(None, 99), (2.0, 1)], 2.0),
        ([(3.0, 0)], 3.0),
        ([(None, 1)], None),
    ],
)
def test_medians_are_weighted_by_rows(parts: list[tuple[float | None, int]], median: float | None):
    taps = [tap(local_roundings_median=value, num_rows=weight) for value, weight in parts]
    assert merge(taps).local_roundings_median == median


def test_runs_are_merged_tap_by_tap_in_graph_order():
    runs = [sound_run(), sound_run("chunked"), missing_run()]
    taps = merge_taps(runs)
    assert [tap.name for tap in taps] == [tap.name for tap in runs[0].taps]
    verdicts = {tap.name: tap.verdict for tap in taps}
    assert verdicts["model.layers.1.attention"] is Verdict.MISSING
    assert {tap.num_rows for tap in taps} == {2 * NUM_ROWS, 3 * NUM_ROWS}


def test_totals():
    runs = [sound_run(), wrong_run(num_layers=3, layer=1), missing_run()]
    tokens, coverage = sum_tokens(runs), sum_coverage(runs)
    assert (tokens.compared, tokens.equal, tokens.ties) == (288, 280, 3)
    assert coverage.missing == NUM_ROWS
    assert coverage.triggers == ("decode", "batch", "block_boundary")
    assert sum_seconds([None, 1.5, 2.0]) == 3.5
    assert sum_seconds([None]) is None


def test_a_field_without_a_rule_is_an_error_when_it_is_declared():
    with pytest.raises(TypeError, match=r"Figures.mean names 0 rules for merging, expected one: write Annotated"):

        @mergeable
        @dataclass
        class Figures:
            num_rows: Annotated[int, TOTAL]
            mean: float | None = None


def test_every_figure_of_a_tap_is_merged_by_its_rule():
    """No figure of the worst tap stands for all of them by accident: each is set in the better tap alone."""
    worst = tap(verdict=Verdict.BUG)
    for field in fields(TapResult):
        if "float" in str(field.type):
            better = tap(**{field.name: 3.0})
            assert getattr(merge([worst, better]), field.name) == 3.0, field.name


def test_what_one_schedule_reached_is_reached():
    parts = [
        Coverage(experts_not_chosen=("gate[0]", "gate[2]", "gate[3]"), not_reached=("batch", "preempted")),
        Coverage(experts_not_chosen=("gate[3]", "gate[1]", "gate[0]"), not_reached=("preempted",)),
    ]
    whole = merged(parts, worst=parts[1])
    assert (whole.experts_not_chosen, whole.not_reached) == (("gate[0]", "gate[3]"), ("preempted",))
    assert merged(parts[:1], worst=parts[0]) == parts[0]


def test_conditions_that_no_schedule_reached_together_are_said_in_pairs():
    parts = [Coverage(triggers=("batch", "rewound")), Coverage(triggers=("prefix_hit", "batch"))]
    assert merged(parts, worst=parts[0]).not_reached == ("prefix_hit with rewound",)
    together = [*parts, Coverage(triggers=("prefix_hit", "rewound"))]
    assert merged(together, worst=parts[0]).not_reached == ()
