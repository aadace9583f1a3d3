"""The page: what it says, that nothing from outside becomes markup, and that a real browser shows it."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness.report.page.check_view import growth_along_depth
from harness.report.page.html import report_html
from harness.results.check import CheckResult, PositionError, Verdict

from .browser import Browser
from .examples import build, check, explained_run
from .profile_examples import phase, profile

HOSTILE = '</script><img src=x onerror="document.title=1">{{ 7 * 7 }}</style>'


class Page(HTMLParser):
    """Elements, addresses and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile_check() -> CheckResult:
    run = explained_run()
    taps = tuple(replace(tap, name=f"{tap.name}{HOSTILE}", site=f"{tap.site}{HOSTILE}") for tap in run.taps[:30])
    divergence = replace(run.first_divergence, tap=taps[5].name, phase=HOSTILE)  # type: ignore[type-var]
    findings = tuple(replace(finding, message=HOSTILE, tap=HOSTILE) for finding in run.findings)
    run = replace(run, taps=taps, first_divergence=divergence, findings=findings, schedule=HOSTILE)
    return replace(check(run), engine=HOSTILE, model=HOSTILE, notes=(HOSTILE,))


def grown_check() -> CheckResult:
    """Return a mismatch with the error by position."""
    positions = tuple(
        PositionError(tap="output", position=at, ratio_median=1.0, ratio_max=1.0 + at) for at in range(40)
    )
    return check(replace(explained_run(), positions=positions))


def test_the_verdict_comes_first(result: CheckResult):
    text = Page(report_html(result)).text.split("</style>")[-1]
    verdict = {"pass": "Pass", "mismatch": "Mismatch", "nothing": "Nothing checked"}[result.outcome]
    assert verdict in text
    assert text.index(verdict) < text.index("What was checked")


def test_the_culprit_stands_with_its_cause():
    text = Page(report_html(build("explained"))).text
    place = text.index("First divergence")
    assert place < text.index("model.layers.20.q_rope", place) < text.index("rotary at a position off by one", place)
    assert "holds the key of request 0, position 1" in text


def test_the_heat_map_has_a_cell_for_every_operation_of_every_layer():
    result = build("mismatch")
    (run,) = result.runs
    page = report_html(result)
    assert all(page.count(f'title="{tap.name} ') >= 1 for tap in run.taps)
    assert page.count('class="level-6 wrong culprit"') == 1


def test_error_along_position_marks_the_first_wrong_row():
    page = report_html(grown_check())
    assert "first wrong row: position 17" in page
    assert "first wrong row" not in report_html(check(explained_run()))


def test_a_check_and_a_profile_share_a_page():
    page = Page(report_html(build("pass"), profile()))
    assert page.tags.count("h1") == 1
    assert page.text.index("What was checked") < page.text.index("time to first token")


def test_a_report_of_nothing_is_refused():
    with pytest.raises(ValueError, match="a check or a profile"):
        report_html()


def test_a_profile_links_its_captures_and_nothing_else():
    page = Page(report_html(profile=profile()))
    assert page.addresses == [
        "./trace/reference-prefill-r0.1.pt.trace.json.gz",
        "./memory/reference-prefill-r0.pickle",
    ]


def test_an_operation_has_the_same_colour_in_every_phase():
    page = report_html(profile=profile(phase(), phase("decode")))
    assert len(re.findall(r'<i class="part-1" style="[^"]*" title="attention ', page)) == 2
    assert page.count('<i class="part-1"></i>attention') == 1, "one legend for all bars"


def test_names_from_outside_stay_text():
    strange = profile(phase(name=HOSTILE, operation=HOSTILE))
    honest = Page(report_html(grown_check(), profile()))
    page = Page(report_html(hostile_check(), replace(strange, model=HOSTILE, notes=(HOSTILE,))))
    assert "onerror" not in page.attributes
    assert set(page.tags) <= {*honest.tags, "p"}
    assert page.tags.count("script") == honest.tags.count("script")
    assert not any("img" in page.tags for page in (page, honest))
    assert "{{ 7 * 7 }}" in page.text
    assert all(address.startswith("./") for address in page.addresses)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(report_html(grown_check(), profile()), encoding="utf-8")
    return path


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_it_without_a_network(browser: Browser, path: Path, width: int, dark: bool):
    browser.open(path, width=width, dark=dark)
    assert browser.requests() == [path.as_uri()]
    assert browser.complaints() == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    red, *_ = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (red < 64) is dark


OVERLAPPING = """(() => {
  const boxes = [...document.querySelectorAll('.roofline .dot b')].map(label => label.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return boxes.filter((box, i) => boxes.some((other, j) => i !== j && meet(box, other))).length;
})()"""
CUT = """[...document.querySelectorAll('.tick, .dot b, .code, .names li, .share')].filter(element => {
  const box = element.getBoundingClientRect();
  return box.width && (box.left < 0 || box.right > document.documentElement.clientWidth + 0.5);
}).map(element => element.textContent)"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 768, 1200])
def test_nothing_is_cut_or_covered_at_any_width(browser: Browser, tmp_path: Path, width: int, dark: bool):
    path = tmp_path / "crowded.html"
    names = [f"model.operation_with_a_long_name_{index}" for index in range(9)]
    points = tuple(replace(phase().roofline[0], name=name, flops=10**8 - index) for index, name in enumerate(names))
    crowded = replace(phase(operation=names[0]), roofline=(*phase().roofline, *points[:3]))
    path.write_text(report_html(profile=profile(crowded)), encoding="utf-8")
    browser.open(path, width=width, dark=dark)
    browser.evaluate("document.querySelectorAll('details').forEach(element => element.open = true)")
    assert browser.evaluate(CUT) == []
    assert browser.evaluate(OVERLAPPING) == 0
    assert browser.evaluate("document.querySelectorAll('.names li').length") == 4
    shares = "[...document.querySelectorAll('td.number.share')].every(cell => cell.offsetWidth > 0)"
    assert browser.evaluate(shares) is True


def test_the_pointer_brings_up_the_stack(browser: Browser, path: Path):
    browser.open(path, width=1200)
    head = "document.querySelector('.stack-head').textContent"
    frames = "document.querySelector('.stack ol').textContent"
    assert (browser.evaluate(head), browser.evaluate(frames)) == ("at the peak", "aten::mul")
    x, y = browser.evaluate(
        "(() => { const field = document.querySelector('[data-memory] .field'); field.scrollIntoView(); field.focus();"
        " const box = field.getBoundingClientRect(); return [box.left + 0.3 * box.width, box.top + 20]; })()"
    )
    browser.point_at(x, y)
    assert browser.evaluate(head) == "3 MiB after 0.500 ms"
    assert browser.evaluate(frames) == "attention  rotary.py:51"
    browser.press("ArrowRight")
    assert browser.evaluate(head) == "4 MiB after 1.000 ms"


def test_hostile_names_do_nothing_in_a_browser(browser: Browser, tmp_path: Path):
    path = tmp_path / "hostile.html"
    path.write_text(report_html(hostile_check(), profile(phase(operation=HOSTILE))), encoding="utf-8")
    browser.open(path, width=1200)
    assert browser.requests() == [path.as_uri()]
    assert browser.complaints() == []
    assert browser.evaluate("document.title").startswith("mismatch · </script>")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0


@pytest.mark.parametrize(("verdict", "styles"), [("bug", ["wrong"]), ("systematic", ["wrong"]), ("noise", [])])
def test_dots_of_wrong_operations_are_marked(verdict, styles):
    run = explained_run()
    culprit = run.first_divergence.tap
    index = next(at for at, tap in enumerate(run.taps) if tap.name != culprit and tap.propagated_ratio_max is not None)
    taps = list(run.taps)
    taps[index] = replace(taps[index], verdict=Verdict(verdict))
    plot = growth_along_depth(replace(run, taps=tuple(taps)))
    marked = [dot.style for dot in plot.dots if dot.title.startswith(f"{taps[index].name} ") and dot.style]
    assert marked == styles
