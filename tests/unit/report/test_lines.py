"""Parts of the texts for a terminal."""

from harness.report.terminal import blocks_text, fact_lines, headline, table_lines


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
