from dataclasses import replace

from harness.report.check.table import MAX_FOLDED_ROWS, Role, sections, table_rows
from harness.results.check import Verdict

from .examples import broken, build, check, sound_run, wrong_run


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
