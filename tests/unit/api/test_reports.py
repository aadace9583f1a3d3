"""Reports: true or false as the check went, the whole diagnosis in the assertion, harmless wherever they are shown."""

from dataclasses import fields
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from harness.api import CheckFailedError, CheckReport, ProfileReport
from harness.report.check.terminal import check_text
from harness.results.check import CheckResult, Outcome

from ..report.examples import NAMES, build, check, explained_run
from ..report.profile_examples import profile
from ..report.test_html import HOSTILE, hostile_check


@pytest.fixture(params=NAMES)
def result(request: pytest.FixtureRequest) -> CheckResult:
    """Return each of the checks in turn."""
    return build(request.param)


def printed(report: object, *, width: int = 100, color: bool = False) -> str:
    console = Console(file=StringIO(), width=width, force_terminal=color, color_system="standard" if color else None)
    console.print(report)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_report_is_its_result(result: CheckResult):
    report = CheckReport.of(result)
    assert all(getattr(report, field.name) == getattr(result, field.name) for field in fields(result))
    assert report.outcome is result.outcome


def test_it_is_true_where_the_check_passed(result: CheckResult):
    report = CheckReport.of(result)
    assert bool(report) is report.is_ok is (result.outcome is Outcome.PASS)


def test_a_check_that_passed_asserts_nothing():
    CheckReport.of(build("pass")).assert_ok()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mismatch", "nan", "nothing", "missing", "schedules", "explained"])
def test_every_other_one_is_an_assertion_error_with_the_whole_diagnosis(name: str):
    report = CheckReport.of(build(name))
    with pytest.raises(AssertionError) as caught:
        report.assert_ok()
    assert isinstance(caught.value, CheckFailedError)
    assert caught.value.report is report
    assert str(caught.value) == check_text(build(name), width=100, color=False) == report.text() == str(report)


def test_the_assertion_shows_the_table_the_divergence_and_the_cause():
    with pytest.raises(AssertionError) as caught:
        CheckReport.of(check(explained_run())).assert_ok()
    message = str(caught.value)
    assert message.startswith("MISMATCH  reference · qwen3-tiny")
    for words in ("layer  operation", "self_attn.o_proj", "First divergence:", "Cause:"):
        assert words in message


def test_its_repr_is_one_short_line(result: CheckResult):
    text = repr(CheckReport.of(result))
    assert text.startswith(f"<CheckReport {result.outcome}: reference, qwen3-tiny, ")
    assert len(text) < 200
    assert "\n" not in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [80, 100, 160])
def test_rich_prints_what_the_command_prints_at_the_consoles_width(result: CheckResult, width: int):
    text = printed(CheckReport.of(result), width=width)
    assert text == check_text(result, width=width, color=False)


def test_rich_prints_its_colours():
    assert "\x1b[" in printed(CheckReport.of(build("explained")), color=True)


def test_brackets_in_names_are_no_markup_of_richs():
    report = CheckReport.of(build("pass"))
    object.__setattr__(report, "engine", "[bold]x[/bold] [link=file:///]y[/link]")
    assert "[bold]x[/bold] [link=file:///]y[/link]" in printed(report, width=200)


class Tags(HTMLParser):
    """Elements, attributes and text of HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_notebook_shows_the_same_text_with_styles_of_its_own(result: CheckResult):
    html = Tags(CheckReport.of(result)._repr_html_())
    assert (html.tags, html.attributes) == ({"pre", "span"}, {"style"})
    assert [line.rstrip() for line in html.text.splitlines()] == CheckReport.of(result).text().splitlines()


def test_hostile_names_stay_text_in_a_notebook():
    report = CheckReport.of(hostile_check())
    html = Tags(report._repr_html_())
    assert (html.tags, html.attributes) == ({"pre", "span"}, {"style"})
    assert HOSTILE in html.text
    assert "<script" not in report._repr_html_().lower()


def test_hostile_control_characters_do_not_reach_a_terminal_or_a_notebook():
    report = CheckReport.of(build("pass"))
    object.__setattr__(report, "engine", "\x1b]8;;https://example.com\x1b\\click\x1b]8;;\x1b\\")
    assert "\x1b]" not in printed(report, color=True)
    assert "href" not in Tags(report._repr_html_()).attributes


def test_the_page_and_the_document_are_those_of_the_command_line(result: CheckResult):
    report = CheckReport.of(result)
    assert report.html().startswith("<!doctype html>") or report.html().startswith("<!DOCTYPE html>")
    assert report.as_dict()["verdict"] == result.outcome


def test_a_profile_can_be_shown_too():
    report = ProfileReport.of(profile())
    assert repr(report) == "<ProfileReport reference, /checkpoints/qwen3-tiny, float32, cpu: prefill>"
    assert [line.rstrip() for line in printed(report, width=200).splitlines()] == [
        line.rstrip() for line in str(report).splitlines()
    ]
    assert Tags(report._repr_html_()).tags <= {"pre", "span"}
    assert report.as_dict()["engine"] == "reference"
    assert "<html" in report.html()
