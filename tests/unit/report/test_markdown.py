from dataclasses import replace

from harness.report.check.markdown import check_markdown, escaped
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
    assert {row.count("|") for row in rows} <= {9}
    assert bool(rows) == any(run.taps for run in result.runs)


def test_names_are_shown_literally():
    assert escaped("a|b_c <img> `x`\n") == "a\\|b\\_c \\<img\\> \\`x\\`�"
    run = sound_run()
    odd = replace(run.taps[0], name="a|b", site="a|b")
    text = check_markdown(check(replace(run, taps=(odd, *run.taps[1:]))))
    row = next(line for line in text.splitlines() if "a\\|b" in line)
    assert row.replace("\\|", "").count("|") == 9


def test_blocks_are_separated_by_one_empty_line(result: CheckResult):
    assert "\n\n\n" not in check_markdown(result)
