"""What the page looks like, beside what it looked like: at three widths, light and dark, in a real browser.

The browser has one font, which the tests write (font.py): the fonts of the machine do not move a line. Browsers differ
in how they draw an edge, so that no picture is compared pixel by pixel. Of each landmark of the page (a chart, the heat
map, a table) its place across the page, the colour of its text, and the mean colours of a coarse grid over its picture
without the text are compared. After a change that is meant, `pytest --golden-update` writes `screenshots.json`
anew; look at the page before.
"""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.report.page.html import report_html

from .browser import Browser
from .examples import check, explained_run
from .profile_examples import phase, profile

STORED = Path(__file__).with_name("screenshots.json")
WIDTHS = (390, 768, 1200)
LANDMARKS = (
    "header",
    "div.culprit",
    ".heat",
    ".bar",
    ".strip",
    "figure",
    "figure svg",
    "details .scroll",
)
COLUMNS, ROWS = 8, 4
MOST_PX = 2
"""What a landmark may be elsewhere across the page: another version of the browser rounds widths in another way."""
MOST_COLOUR, MOST_MEAN_COLOUR = 12, 1.5
"""Of 255: of one cell, and of all cells of a landmark; a line through a cell is drawn half a pixel elsewhere."""

WITHOUT_TEXT = """(() => {
  const style = new CSSStyleSheet();
  style.replaceSync('* { color: transparent !important; text-decoration-color: transparent !important }');
  document.adoptedStyleSheets = [style];
})()"""
INKS = """(selectors => Object.fromEntries(selectors.flatMap(selector =>
  [...document.querySelectorAll(selector)].map((element, i) =>
    [`${selector} ${i}`, getComputedStyle(element).color.match(/[0-9]+/g).slice(0, 3).map(Number)]))))"""
BOXES = """(selectors => selectors.flatMap(selector => [...document.querySelectorAll(selector)].map((element, i) => {
  const {left, top, width, height} = element.getBoundingClientRect();
  return {name: `${selector} ${i}`, left: left + scrollX, top: top + scrollY, width, height};
}).filter(box => box.width && box.height)))"""
GRID = """(async (picture, boxes, columns, rows) => {
  const image = new Image();
  image.src = 'data:image/png;base64,' + picture;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  const mean = (left, top, width, height) => {
    const {data} = context.getImageData(left, top, Math.max(1, width), Math.max(1, height)), sum = [0, 0, 0];
    for (let at = 0; at < data.length; at++) if (at % 4 < 3) sum[at % 4] += data[at];
    return sum.map(value => Math.round(4 * value / data.length));
  };
  return boxes.map(box => [...Array(columns * rows).keys()].map(cell => mean(
    Math.round(box.left + (cell % columns) * box.width / columns),
    Math.round(box.top + Math.floor(cell / columns) * box.height / rows),
    Math.floor(box.width / columns), Math.floor(box.height / rows))));
})"""


def page() -> str:
    run = replace(explained_run(), positions=())
    return report_html(check(run), profile(phase(), phase("decode")))


def looks(browser: Browser, page: str, folder: Path, width: int, *, dark: bool) -> dict[str, dict[str, Any]]:
    """Return edges, colour of the text and grid of colours of each landmark."""
    path, empty, picture = folder / "report.html", folder / "empty.html", folder / "report.png"
    path.write_text(page, encoding="utf-8")
    browser.open(path, width=width, dark=dark)
    browser.resize(width, browser.evaluate("document.documentElement.scrollHeight"))
    inks = browser.evaluate(f"{INKS}({json.dumps(LANDMARKS)})")
    browser.evaluate(WITHOUT_TEXT)
    browser.screenshot(picture)  # the first one settles the layout: lines may break anew
    boxes = browser.evaluate(f"{BOXES}({json.dumps(LANDMARKS)})")
    browser.screenshot(picture)
    empty.write_text("<!doctype html>", encoding="utf-8")
    browser.open(empty, width=width)  # the page's own policy admits no picture
    encoded = base64.b64encode(picture.read_bytes()).decode()
    grids = browser.evaluate(f"{GRID}('{encoded}', {json.dumps(boxes)}, {COLUMNS}, {ROWS})", awaits=True)
    return {
        box["name"]: {
            "edges": [round(box["left"]), round(box["left"] + box["width"])],
            "ink": inks[box["name"]],
            "grid": grid,
        }
        for box, grid in zip(boxes, grids, strict=True)
    }


def changes(seen: dict[str, dict[str, Any]], stored: dict[str, dict[str, Any]]) -> list[str]:
    """Return what looks different."""
    if seen.keys() != stored.keys():
        return [f"landmarks: {sorted(seen.keys() ^ stored.keys())}"]
    told = []
    for name, landmark in seen.items():
        moved = max(abs(new - old) for new, old in zip(landmark["edges"], stored[name]["edges"], strict=True))
        if moved > MOST_PX:
            told.append(f"{name} lies elsewhere: {landmark['edges']}, was {stored[name]['edges']}")
        if landmark["ink"] != stored[name]["ink"]:
            told.append(f"{name} has text of another colour: {landmark['ink']}, was {stored[name]['ink']}")
        cells = zip(landmark["grid"], stored[name]["grid"], strict=True)
        differences = [max(abs(new - old) for new, old in zip(*cell, strict=True)) for cell in cells]
        mean = sum(differences) / len(differences)
        if max(differences) > MOST_COLOUR or mean > MOST_MEAN_COLOUR:
            told.append(f"{name} has other colours: by {max(differences)} at most, {mean:.1f} on average")
    return told


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_looks_the_same(
    browser: Browser, tmp_path: Path, width: int, dark: bool, request: pytest.FixtureRequest
) -> None:
    seen = looks(browser, page(), tmp_path, width, dark=dark)
    key = f"{width} {'dark' if dark else 'light'}"
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    if request.config.getoption("golden_update"):
        lines = [f"{json.dumps(name)}: {json.dumps(landmark)}" for name, landmark in {**stored, key: seen}.items()]
        STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    else:
        assert changes(seen, stored[key]) == []


@pytest.fixture(scope="module")
def before(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return looks(browser, page(), tmp_path_factory.mktemp("before"), 768, dark=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("style", "told"),
    [
        ("main { padding-left: 8px }", "header 0 lies elsewhere"),
        (".bar i, .bar { background: none !important }", ".bar 0 has other colours"),
        (".heat i { background: white !important }", ".heat 0 has other colours"),
        ("figure svg path { stroke: none !important; fill: none !important }", "figure svg"),
        ("figure { transform: translateX(60px) }", "figure 0 lies elsewhere"),
        ("div.culprit { display: none }", "landmarks: ['div.culprit 0']"),
        ("header { color: #888 !important }", "header 0 has text of another colour"),
    ],
)
def test_a_change_is_seen(
    browser: Browser, before: dict[str, dict[str, Any]], tmp_path: Path, style: str, told: str
) -> None:
    changed = page().replace("</head>", f"<style>{style}</style></head>")
    differences = changes(looks(browser, changed, tmp_path, 768, dark=False), before)
    assert any(told in line for line in differences), differences
