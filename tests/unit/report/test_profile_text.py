"""A profile on a terminal: on a narrow one number columns go, and names stay whole."""

from dataclasses import replace

import pytest

from harness.report.page.html import report_html
from harness.report.profile import profile_document, profile_text
from harness.results.profile import ProfileResult, TableRow

from .profile_examples import phase, profile

LONG = "self_attn.an_operation_with_a_name_of_some_sixty_characters__"


@pytest.fixture
def crowded() -> ProfileResult:
    """Return a profile in which every column of every table is shown."""
    row = TableRow(
        name=LONG,
        calls=123_456,
        total_us=9e6,
        self_us=8e6,
        share=0.5,
        num_collapsed=28,
        spread=(1e4, 2e5),
        device_us=1e6,
    )
    prefill = replace(
        phase(), operations=(row,), layers=(row,), operators=(row,), cpu_ms=1234.5, wall_ms=12_345.6,
        flops_formula=1, kv_bytes_formula=1, peak_bytes=123 << 30,
    )  # fmt: skip
    return profile(prefill, replace(prefill, name="decode"))


def tables(text: str) -> list[str]:
    """Return header, rule and rows of each table."""
    lines = text.splitlines()
    rules = [at for at, line in enumerate(lines) if line.startswith("---")]
    return [line for at in rules for line in (lines[at - 1], lines[at], lines[at + 1])]


@pytest.mark.parametrize("width", [80, 100])
def test_names_stay_whole_and_number_columns_go(crowded: ProfileResult, width: int) -> None:
    text = profile_text(crowded, width=width)
    assert max(map(len, tables(text))) <= width
    assert text.count(LONG) == 6, "three tables in each of two phases"
    assert text.count("share") >= 6
    assert "bound by" in text


def test_a_wide_terminal_loses_no_column(crowded: ProfileResult) -> None:
    assert profile_text(crowded, width=300) == profile_text(crowded)
    assert all(name in profile_text(crowded) for name in ("calls", "self us", "of one", "GPU us", "KV MiB", "steps"))
    assert "of one" not in profile_text(crowded, width=80)


def test_an_operation_has_its_flops_and_bytes_by_formula():
    one = phase()
    operation = replace(one.roofline[0], name=one.operations[0].name, flops=12_345_000, bytes_moved=678_900)
    text = profile_text(profile(replace(one, roofline=(one.roofline[0], operation))))
    header, _, row, *_ = text[text.index("by operation") :].splitlines()[2:]
    assert header.split()[-2:] == ["MFLOP", "MB"]
    assert row.split()[-2:] == ["12.345", "0.679"]


def test_memory_that_was_not_measured_is_shown_nowhere():
    bare = replace(phase(), memory=None, snapshot=None, peak_bytes=None, bytes_allocated=None, operators=())
    result = profile(bare)
    result = replace(result, overhead=replace(result.overhead, memory=None))
    text, page = profile_text(result), report_html(None, result)
    assert [words for words in ("peak", "memory", "by operator") if words in text] == []
    assert [words for words in ("peak memory", ".pickle", "By operator") if words in page] == []
    (shown,) = profile_document(result)["phases"]
    assert {shown[name] for name in ("memory", "snapshot", "peak_bytes", "bytes_allocated", "num_kept")} == {None}
