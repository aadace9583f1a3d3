"""The check at a terminal, and the parts of texts for one."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from harness.errors import Code
from harness.report.check.table import COLUMNS
from harness.report.check.terminal import check_text
from harness.report.terminal import blocks_text, fact_lines, headline, table_lines
from harness.results.check import CheckResult, Finding

from .examples import NAMES, build, check, sound_run, wrong_run

ANSI = re.compile(r"\x1b\[[0-9;]*m")
PASS = """\
PASS  reference · qwen3-tiny · bfloat16 · cpu · 3 requests · 1,842 rows ·
      60 taps · plain, chunked, batched

  layer  operation                 median   max  bound  propagated  verdict
  ─────────────────────────────────────────────────────────────────────────
         model.embed_tokens             -     -      -           -  exact
    0-2  input_layernorm             1.37  2.21  0.446        1.06  noise
         self_attn.q_proj           0.994  1.61  0.325        1.06  noise
"""
CULPRIT = """\
     20  input_layernorm           1.37  2.39  0.482        1.24  noise
         self_attn.q_proj         0.994  1.79  0.361        1.24  noise
         self_attn.q_norm          1.37  2.39  0.482        1.24  noise
         self_attn.k_proj         0.994  1.79  0.361        1.24  noise
         self_attn.k_norm          1.37  2.39  0.482        1.24  noise
         self_attn.v_proj         0.994  1.79  0.361        1.24  noise
▸        q_rope                    1.24  38.2   19.1        2.21  bug in 37 rows
         k_rope                    1.21  2.14  0.430        4.42  downstream
"""
DIVERGENCE = """
First divergence: model.layers.20.q_rope
                  request 1, position 17, step 4, decode, schedule batched
                  38.2 roundings against a bound of 2.00; propagated error 9.12
                  times HF's own (H040)
"""
CAUSE = """\
           Cause: rotary at a position off by one (+1)
                  decode rows; it takes the median error from 38.2 to 1.42
                  roundings (36 of 37 rows)
                  positions: 17 as 18
                  layer 20, KV head 1: position 17 of request 1 (block 4, slot
                  65, written last by request 0 in step 3) holds the key of
                  request 0, position 1
"""
NOTHING = """\
NOTHING  reference · qwen3-tiny · bfloat16 · cpu · 3 requests · 0 rows ·
         0 taps · plain

  H051  the engine offers neither taps nor tokens

  coverage     0 of 0 rows of taps recorded
  timings      golden 2.31 s
"""


def test_a_pass_begins_with_the_verdict_and_folds_the_layers():
    text = check_text(build("pass"), width=80, color=False)
    assert text.startswith(PASS)
    assert "First divergence" not in text
    assert len(text.splitlines()) < 44


def test_a_mismatch_points_at_the_culprit_between_what_is_sound_and_what_follows():
    text = check_text(build("mismatch"), width=80, color=False)
    assert CULPRIT in text
    assert DIVERGENCE in text
    assert text.count("▸") == 1


def test_the_cause_and_the_way_into_the_cache_stand_under_the_first_divergence():
    text = check_text(build("explained"), width=80, color=False)
    assert CAUSE in text
    assert "times HF's own (H040)\n           Cause:" in text.replace("\n                  times", " times")


def test_nothing_checked_has_no_table():
    assert check_text(build("nothing"), width=80, color=False) == NOTHING


def test_schedules_that_pass_take_one_line_beside_one_that_does_not():
    text = check_text(build("schedules"), width=100, color=False)
    assert "\npasses:   plain, chunked\n\ndiffers:  batched\n\nFirst divergence:" in text
    assert text.count("layer  operation") == 1


@pytest.mark.sampled(12)
@pytest.mark.parametrize("width", [80, 81, 97, 100, 120, 140, 200])
@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_wider_than_the_terminal(name: str, width: int):
    lines = check_text(build(name), width=width, color=True).splitlines()
    assert max(len(ANSI.sub("", line)) for line in lines) <= width


def test_long_names_do_not_break_the_width():
    run = wrong_run()
    finding = Finding(code=Code.LOCAL_ERROR, message="x" * 300)
    taps = tuple(replace(tap, site=tap.site + "_of_a_module_with_a_long_name" * 3) for tap in run.taps)
    result = replace(check(replace(run, taps=taps, findings=(finding,))), model="/models/" + "long/" * 60 + "qwen")
    text = check_text(result, width=80, color=False)
    assert max(map(len, text.splitlines())) <= 80
    assert "bug in 37 rows" in text


def test_a_narrow_terminal_counts_as_80_columns():
    assert check_text(build("pass"), width=20, color=False) == check_text(build("pass"), width=80, color=False)


def test_a_wider_terminal_shows_more_columns():
    headers = {
        width: next(
            line for line in check_text(build("pass"), width=width, color=False).splitlines() if "layer" in line
        )
        for width in (80, 100, 140)
    }
    assert "rows" not in headers[80]
    assert "rows" in headers[100]
    assert headers[140].split() == " ".join(column.header for column in COLUMNS).split()


def test_a_model_of_80_layers_fits_on_a_page():
    text = check_text(check(wrong_run(num_layers=80, layer=41)), width=100, color=False)
    assert len(text.splitlines()) < 60


def test_colour_changes_nothing_but_colour(result: CheckResult):
    plain = check_text(result, width=100, color=False)
    assert "\x1b" not in plain
    assert ANSI.sub("", check_text(result, width=100, color=True)) == plain


def test_the_culprit_is_red_and_what_follows_is_dim():
    lines = check_text(build("mismatch"), width=100, color=True).splitlines()
    assert any(line.startswith("\x1b[1;31m▸") for line in lines)
    assert any(line.startswith("\x1b[2m") and "k_rope" in line for line in lines)


def test_a_name_cannot_send_control_characters_to_the_terminal():
    result = replace(check(sound_run("\x1b]0;x\x07")), engine="\x1b[2J", notes=("\r\x1b[1A",))
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", check_text(result, width=80, color=False))


def test_the_report_needs_no_torch():
    forms = ", ".join(f"harness.report.check.{form}" for form in ("terminal", "markdown", "json", "dtypes"))
    code = f"import sys, {forms}; sys.exit(bool(sys.modules.keys() & {{'torch', 'transformers', 'numpy'}}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_blocks_without_a_line_are_left_out():
    assert blocks_text([["a", "b"], [], ["c"]]) == "a\nb\n\nc\n"


def test_names_and_notes_do_not_reach_the_terminal_as_control_characters():
    assert "\x1b" not in headline("PASS", "model\x1b[2J", "cpu")
    assert "\x1b" not in "".join(fact_lines([("note", "a server's \x1b[2J words")], 80))


def test_a_long_fact_goes_on_below_its_first_word():
    assert list(fact_lines([("note", "one two three")], 23)) == ["  note        one two", "              three"]


def test_a_table_with_a_legend_is_indented_as_the_legend_is():
    assert table_lines([["1"]], ["n"]) == ["n", "---", "1"]
    assert table_lines([["1"]], ["n"], legend=["n: number"]) == ["  n", "  ---", "  1", "", "  n: number"]
