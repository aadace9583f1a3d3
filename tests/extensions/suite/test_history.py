"""A suite over time: since when a case fails, when its numbers changed, and what a bisection begins with."""

import json

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.suite.history import history_of, read_history
from harness.extensions.suite.history_report import history_json, history_text
from harness.extensions.suite.report import history_html, suite_json
from harness.extensions.suite.result import CaseResult, CaseVerdict, SuiteResult

PLACE = {"tap": "model.norm", "request": 0, "position": 1}
NAMES = {".": "pass", "M": "mismatch", "E": "error", "L": "lost"}


def run(label, letters, bits="", *, begun_at=None, seconds=1.0):
    """A run with the cases a, b, ..., each with a verdict and perhaps bits by a letter."""
    cases = [
        CaseResult(
            name=f"{name}[x]", verdict=CaseVerdict(NAMES[letter]), labels={"case": name}, seconds=seconds,
            bits=bit.strip() or None, first_divergence=None if letter == "." else PLACE,
        )
        for name, letter, bit in zip("abcdef", letters, bits.ljust(len(letters)), strict=False) if letter != " "
    ]  # fmt: skip
    return SuiteResult(cases=tuple(cases), label=label, begun_at=begun_at)


@pytest.fixture
def nights():
    return [run("v1", "....", "pppp"), run("v2", ".M. ", "pqp "), run("v3", "EM..", " qr ", seconds=2.0)]


def test_each_case_has_its_way(nights):
    history = history_of(nights)
    assert [trend.name for trend in history.trends] == ["a[x]", "b[x]", "c[x]", "d[x]"]
    assert [trend.first_failure for trend in history.trends] == [2, 1, None, None]
    assert [trend.last_pass for trend in history.trends] == [1, 0, 2, 2]
    assert [trend.changed_bits for trend in history.trends] == [(), (1,), (2,), ()]


def test_a_failure_that_was_mended_is_over_and_a_gap_is_none():
    (mended,) = history_of([run("1", "."), run("2", "M"), run("3", ".")]).trends
    assert mended.first_failure is None
    (still,) = history_of([run("1", "."), run("2", "M"), run("3", " "), run("4", "M")]).trends
    assert (still.first_failure, still.last_pass) == (1, 0)
    (gone,) = history_of([run("1", "M"), run("2", " ")]).trends
    assert gone.first_failure is None


def test_runs_are_in_the_order_in_which_they_began():
    later, sooner = (
        run("b", ".", begun_at="2026-11-24T03:00:00+00:00"),
        run("a", "M", begun_at="2026-11-23T03:00:00+00:00"),
    )
    assert [item.label for item in history_of([later, sooner]).runs] == ["a", "b"]
    assert [item.label for item in history_of([run("b", "."), sooner]).runs] == ["b", "a"], "one does not say when"


def test_the_text_has_what_fails_first_and_what_changed(nights):
    text = history_text(history_of(nights), width=200)
    assert "3 runs · 4 cases in the newest · 2 not passing, 1 of them new" in text
    rows = [line.split() for line in text.splitlines() if "[x]" in line]
    assert [row[0] for row in rows] == ["a[x]", "b[x]", "c[x]"], "d passes as ever"
    assert rows[0][1:3] == ["..E", "v3"]
    assert rows[1][1:3] == [".MM", "v2"]
    assert "model.norm, request 0, position 1" in text
    assert rows[2][-4:] == ["v3", "1.00", "->", "2.00"]


def test_the_json_has_every_case_of_every_run(nights):
    document = json.loads(json.dumps(history_json(history_of(nights)), allow_nan=False))
    assert [item["label"] for item in document["runs"]] == ["v1", "v2", "v3"]
    assert document["runs"][1]["counts"] == {"pass": 2, "mismatch": 1, "error": 0, "lost": 0}
    by_name = {case["name"]: case for case in document["cases"]}
    assert by_name["b[x]"]["first_failure"] == 1
    assert by_name["d[x]"]["runs"][1] is None
    assert by_name["b[x]"]["runs"][2]["first_divergence"] == PLACE


def test_the_page_takes_no_markup_from_outside():
    page = history_html(history_of([run("<b>", "."), run("v2", "M", seconds=3.0)]))
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert "polyline" in page
    assert "<script" not in page


def test_runs_are_read_from_folders_and_folders_of_folders(tmp_path, nights):
    for name, night in zip(("1", "2", "3"), nights, strict=True):
        folder = tmp_path / "nights" / name
        folder.mkdir(parents=True)
        (folder / "suite.json").write_text(json.dumps(suite_json(night)))
    whole = read_history([tmp_path / "nights"])
    assert [item.label for item in whole.runs] == ["v1", "v2", "v3"]
    assert read_history([tmp_path / "nights" / name for name in "123"]) == whole
    (tmp_path / "none").mkdir()
    for path in ("none", "missing.json"):
        with pytest.raises(HarnessError) as raised:
            read_history([tmp_path / path])
        assert raised.value.code is Code.BAD_SUITE_RESULT
