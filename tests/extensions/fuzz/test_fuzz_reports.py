"""A search as text and as JSON."""

import json
from dataclasses import replace

import pytest

from harness.errors import Code
from harness.extensions.fuzz.report import fuzz_json, fuzz_text
from harness.extensions.fuzz.result import FuzzFinding, FuzzResult, SentRequest, SentWorkload
from harness.results.check import Coverage, Divergence, Explanation, Finding, Outcome, RunResult, TokenResult, Verdict

WORKLOAD = SentWorkload(
    requests=(
        SentRequest(token_ids=(5, 6, 7), prompt_length=2),
        SentRequest(token_ids=(5, 6, 7, 8), prompt_length=2, fork_of=0),
        SentRequest(token_ids=(5, 9), prompt_length=2, arrival=4, is_aborted=True),
    ),
    limits={"block_size": 4, "enable_prefix_caching": True},
)
EXPLANATION = Explanation(
    cause="reads one block from a wrong place", scope="decode rows", residual_before=9.0, residual_after=1.0,
    num_rows=1, num_explained=1,
)  # fmt: skip
DIVERGENCE = Divergence(
    tap="model.layers.0.attention", request=1, position=3, verdict=Verdict.BUG, code=Code.LOCAL_ERROR,
    local_roundings=float("inf"), explanation=EXPLANATION,
)  # fmt: skip
RUN = RunResult(
    schedule="searched", outcome=Outcome.MISMATCH, num_rows=9, taps=(), first_divergence=DIVERGENCE,
    findings=(Finding(code=Code.LOCAL_ERROR, message="wrong", tap=DIVERGENCE.tap),), tokens=TokenResult(), logits=None,
    coverage=Coverage(),
)  # fmt: skip
FINDING = FuzzFinding(
    signature="H040: attention", workload=WORKLOAD, run=RUN, error=None, found_s=12.0, shrunk_s=3.0, num_rows_found=90,
    num_requests_found=5, num_failures=4, workload_file="out/w.toml", case_file="out/c.toml",
)  # fmt: skip
RESULT = FuzzResult(
    engine="mine", model="/models/tiny", dtype="float32", device="cpu", seed=3, findings=(FINDING,), num_workloads=40,
    num_rows=900, rejected={"too long": 2}, coverage={"prefix hit": 3, "batch": 30},
)  # fmt: skip


def words(result, width=100):
    return " ".join(fuzz_text(result, width=width).split())


def test_a_finding_has_operation_row_cause_workload_and_the_commands_that_repeat_it():
    text = words(RESULT)
    assert text.startswith("FOUND mine · tiny · float32 · cpu · 1 finding · 40 workloads · 900 rows")
    assert "model.layers.0.attention request 1, position 3" in text
    assert "Cause: reads one block from a wrong place" in text
    assert "after 12.0 s; shrunk in 3.00 s from 5 requests of 90 rows; 3 more workloads failed in the same way" in text
    assert "harness fuzz run --replay out/w.toml harness check --case out/c.toml" in text
    assert "limits: block_size=4, enable_prefix_caching=true" in text
    assert "2 workloads: too long" in text


def test_requests_stand_in_a_table():
    rows = [" ".join(line.split()) for line in fuzz_text(RESULT, width=100).splitlines()]
    assert "0 2 2 - at once finished" in rows
    assert "1 2 3 3 with request 0 fork of request 0 finished" in rows
    assert "2 2 1 1 with request 0 before step 4 aborted" in rows


def test_the_commonest_condition_comes_first():
    text = words(RESULT)
    assert text.index("batch") < text.index("prefix hit")


def test_an_engine_that_ended_shows_its_words():
    finding = replace(FINDING, run=None, error="H017: the engine raised KeyError: \x1b[2J", case_file=None)
    text = words(replace(RESULT, findings=(finding,)))
    assert "the engine raised KeyError" in text
    assert "\x1b" not in text
    assert "--case" not in text


def test_what_is_wrong_without_an_operation_is_said():
    run = replace(RUN, first_divergence=None, findings=(Finding(code=Code.ROWS_MISSING, message="2 rows are missing"),))
    assert "H045: 2 rows are missing" in words(replace(RESULT, findings=(replace(FINDING, run=run),)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"findings": ()}, "NOTHING FOUND mine"),
        ({"findings": (), "num_workloads": 0}, "NOTHING CHECKED mine"),
        ({"was_interrupted": True}, "interrupted"),
        ({"notes": ("planted: x",)}, "planted: x"),
    ],
)
def test_what_else_is_said(change, said):
    assert said in words(replace(RESULT, **change))


def test_no_line_is_longer_than_the_terminal():
    text = fuzz_text(replace(RESULT, notes=("x " * 100,), rejected={"y " * 100: 1}), width=80)
    assert max(map(len, text.splitlines())) <= 80


def test_json_has_all_of_it_in_numbers_that_any_parser_reads():
    document = json.loads(json.dumps(fuzz_json(RESULT), allow_nan=False))
    assert document["verdict"] == "mismatch"
    assert document["coverage"] == {"prefix hit": 3, "batch": 30}
    (finding,) = document["findings"]
    assert finding["workload"]["requests"][1]["fork_of"] == 0
    assert finding["first_divergence"]["local_roundings"] == "inf"
    assert finding["run"]["verdict"] == "mismatch"
    failed = fuzz_json(replace(RESULT, findings=(replace(FINDING, run=None, error="H017"),)))["findings"][0]
    assert (failed["run"], failed["first_divergence"], failed["error"]) == (None, None, "H017")
