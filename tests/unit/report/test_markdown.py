from dataclasses import replace

import pytest

from harness.report.check.dtypes import dtypes_text
from harness.report.check.markdown import check_markdown, escaped, fenced, link
from harness.report.check.table import PAGE_COLUMNS
from harness.results.check import CheckResult

from .examples import build, check, sound_run


def test_a_mismatch_is_open_and_marks_the_culprit():
    text = check_markdown(build("mismatch"))
    assert text.startswith("### mismatch: reference · qwen3-tiny · bfloat16 · cpu\n")
    assert "**First divergence: model.layers.20.q\\_rope** at request 1, position 17, step 4" in text
    assert "|  **20** | **q\\_rope** " in text
    assert "<details open>" in text


def test_the_cause_stands_behind_the_first_divergence():
    text = check_markdown(build("explained"))
    assert "**Cause: rotary at a position off by one (+1)** (decode rows; it takes the median error from 38.2" in text


def test_a_pass_is_folded():
    text = check_markdown(build("pass"))
    assert "<details><summary>" in text
    assert "First divergence" not in text


def test_every_row_of_a_table_has_the_same_number_of_cells(result: CheckResult):
    text = check_markdown(result)
    rows = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} <= {len(PAGE_COLUMNS) + 1}
    assert bool(rows) == any(run.taps for run in result.runs)


def test_names_are_shown_literally():
    assert escaped("a|b_c <img> `x`\n") == "a\\|b\\_c \\<img\\> \\`x\\`�"
    run = sound_run()
    odd = replace(run.taps[0], name="a|b", site="a|b")
    text = check_markdown(check(replace(run, taps=(odd, *run.taps[1:]))))
    row = next(line for line in text.splitlines() if "a\\|b" in line)
    assert row.replace("\\|", "").count("|") == len(PAGE_COLUMNS) + 1


def test_blocks_are_separated_by_one_empty_line(result: CheckResult):
    assert "\n\n\n" not in check_markdown(result)


@pytest.mark.parametrize(
    "target", ["javascript:alert(1)", "JAVASCRIPT:alert(1)", "data:text/html,x", " javascript:x", "file:///etc"]
)
def test_a_link_leads_to_a_page_or_to_a_file_beside_it(target):
    assert link("[a]", target) in ("\\[a\\]", f"[\\[a\\]](%20{target.strip()})")


def test_a_link_stays_a_link():
    assert link("a b", "cases/a b/(1)<2>.html") == "[a b](cases/a%20b/%281%29%3C2%3E.html)"
    assert link("a", "https://host/x?y=1#z") == "[a](https://host/x?y=1#z)"


def test_a_fence_is_longer_than_any_in_its_text():
    assert fenced("a\n```\n<script>\n") == "````text\na\n```\n<script>\n````"
    assert fenced("a") == "```text\na\n```"


@pytest.mark.parametrize("tablefmt", ["simple", "github"])
def test_names_in_other_tables_are_shown_literally(tablefmt):
    run = sound_run()
    odd = replace(run.taps[0], name="<img src=x>|b", site="<img src=x>|b")
    result = check(replace(run, taps=(odd, *run.taps[1:])))
    text = dtypes_text([result, result], tablefmt=tablefmt)
    assert ("\\<img src=x\\>\\|b" in text) == (tablefmt == "github")
