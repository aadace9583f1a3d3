"""Sentences that all forms share."""

import math
from dataclasses import replace

import pytest

from harness.errors import Code, printable
from harness.report.check.json import check_json
from harness.report.check.sentences import MAX_FINDINGS, _not_judged, facts, finding_lines
from harness.report.check.table import number
from harness.results.check import CheckResult, Coverage, Extent, Finding

from .examples import build, check, sound_run


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0.0, "0"), (1.0, "1.00"), (0.994, "0.994"), (38.24, "38.2"), (614.2, "614"), (999.7, "1,000"),
        (123456.7, "123,457"), (1.5e9, "1.50e+09"), (0.00312, "0.00312"), (1.234e-5, "1.23e-05"), (-2.5, "-2.50"),
        (math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_number(value: float | None, text: str):
    assert number(value) == text


def test_control_characters_do_not_reach_the_reader():
    assert printable("a\x1b[31m\nb") == "a�[31m�b"


def with_findings(*codes: Code) -> CheckResult:
    findings = tuple(Finding(code=code, message=f"message {at}") for at, code in enumerate(codes))
    return check(replace(sound_run(), findings=findings))


def test_a_flood_of_one_code_does_not_hide_another():
    shown, rest = finding_lines(with_findings(*[Code.LOCAL_ERROR] * 40, Code.TOKENS_DIFFER))
    assert [code for code, _ in shown] == ["H040", "H040", "H040", "H048"]
    assert rest == "and 37 more H040"


def test_the_number_of_findings_is_bounded():
    codes = [code for code in Code for _ in range(2)]
    shown, rest = finding_lines(with_findings(*codes))
    assert len(shown) == MAX_FINDINGS
    assert rest is not None


def test_a_finding_of_several_schedules_appears_once_and_names_them():
    finding = Finding(code=Code.NO_DECODE, message="no decode step ran")
    runs = [sound_run(name) for name in ("plain", "chunked", "batched")]
    everywhere = check(*(replace(run, findings=(finding,)) for run in runs))
    assert finding_lines(everywhere) == ([("H049", "no decode step ran")], None)
    twice = check(runs[0], *(replace(run, findings=(finding,)) for run in runs[1:]))
    assert finding_lines(twice) == ([("H049", "no decode step ran [chunked, batched]")], None)


def test_a_place_the_message_names_is_not_repeated():
    finding = Finding(code=Code.LOCAL_ERROR, message="t at position 3 is off", tap="t", request=1, position=3)
    shown, _ = finding_lines(check(replace(sound_run(), findings=(finding,))))
    assert shown == [("H040", "t at position 3 is off (request 1)")]


def test_facts_end_with_the_timings():
    assert dict(facts(build("missing"))) == {
        "tokens": "95 of 96 equal, 1 tie (margin below the noise)",
        "logits": "top-1 agrees in 99.0 % of 96 rows, KL up to 1.23e-05 nats, smallest margin 0.0312; none in the "
        "other 518 rows",
        "coverage": "36,226 of 36,840 rows of taps recorded, 614 missing: model.layers.1.attention",
        "reached": "decode, batch, block_boundary",
        "not offered": "mlp.gate_proj",
        "timings": "golden 2.31 s, engine 1.10 s, compare 3.02 s",
    }
    assert [label for label, _ in facts(build("pass"))][-1] == "timings"
    assert "the id or the memory of an ended one" in dict(facts(build("pass")))["not asked"]


@pytest.mark.parametrize(
    ("coverage", "words"),
    [
        (Coverage(), "nothing"),
        (Coverage(not_judged=("mlp.act",), only_through=("q_rope",)),
         "mlp.act; only through what is computed from them: q_rope"),
        (Coverage(rows_left_out=1_967), "products and attention in 1,967 rows outside of the sample"),
        (Coverage(rows_left_out=1, states_left_out=("request 0: 3",)),
         "products and attention in 1 row outside of the sample; states after some positions: request 0: 3"),
        (Coverage(judged_compute_of_rows=0.62), "38.0 % of the model's multiply-adds, over all rows"),
        (Coverage(rows_not_judged=3, taps_partly_judged=("mlp.act",)),
         "3 rows whose inputs were not recorded, of mlp.act"),
    ],
)  # fmt: skip
def test_what_was_not_judged_is_said(coverage: Coverage, words: str) -> None:
    assert _not_judged(coverage) == words


def test_how_much_a_workload_had_is_said_with_the_largest_of_many_sizes():
    extents = [
        Extent(
            requests_at_once=3, requests=3, steps=22, step_sizes=(1, 7), shortest_prompt=9, chunks=(7,), most_chunks=2
        ),
        Extent(
            requests_at_once=1,
            requests=6,
            steps=9,
            step_sizes=tuple(range(3, 12)),
            longest_pause=4,
            hit_sizes=(8, 12),
            most_hits=2,
        ),
    ]
    runs = [replace(sound_run(), coverage=Coverage(extent=extent)) for extent in extents]
    assert dict(facts(check(*runs)))["reached"] == (
        "at most 3 requests in a step, 6 requests and 22 steps in a schedule, steps of 1, 3, 4, 5, 6, 7, 8, 9 and 2 "
        "more up to 11 tokens, prompts of at least 9 tokens, chunks of 7 tokens, at most 2 of a prompt, "
        "pauses of at most 4 steps, beginnings of 8, 12 tokens in the cache, each by at most 2 requests"
    )


def test_steps_with_another_label_than_their_rows_are_said():
    run = replace(sound_run(), coverage=Coverage(expected=8, recorded=8, steps_mislabelled=1))
    words = "8 of 8 rows of taps recorded; 1 step labelled decode, with tokens of a prompt"
    assert dict(facts(check(run)))["coverage"] == words


def test_what_a_full_cache_and_drafts_need_is_said_of_all_schedules_together():
    """A schedule without them does not hide what the others did not reach."""
    all_of_them = ("evicted", "forked", "drafts_together")
    plain = replace(sound_run(), coverage=Coverage(not_reached=all_of_them))
    for trigger, names in (
        ("decode", None),
        ("prefix_hit", "evicted, forked"),
        ("drafts_accepted", "drafts_together"),
    ):
        run = replace(plain, coverage=Coverage(not_reached=all_of_them, triggers=(trigger,)))
        result = check(plain, run)
        assert dict(facts(result)).get("not reached") == names
        assert check_json(result)["coverage"]["not_reached"] == (names.split(", ") if names else [])
