"""The documents as a site: no link leads nowhere, and every page is two clicks from the first."""

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import yaml

SITE = Path(__file__).parents[2] / "docs" / "site"
BUILD = runpy.run_path(str(SITE / "build.py"))
ROOT = BUILD["ROOT"]


def linked(page: Path) -> set[Path]:
    """Return what a page links, relative to the repository."""
    return {(ROOT / page.parent / link).resolve().relative_to(ROOT) for link in BUILD["links"](page)}


def in_navigation(entries: list) -> set[Path]:
    """Return the pages of the navigation, which stands on every page."""
    values = [value for entry in entries for value in entry.values()]
    lists = [value for value in values if isinstance(value, list)]
    return {Path(value) for value in values if isinstance(value, str)}.union(*map(in_navigation, lists))


@pytest.mark.parametrize("page", BUILD["pages"](), ids=str)
def test_every_link_leads_to_a_file(page: Path) -> None:
    assert [str(path) for path in linked(page) if not (ROOT / path).exists()] == []


def test_every_page_is_two_clicks_from_the_first() -> None:
    one = in_navigation(yaml.safe_load((SITE / "mkdocs.yml").read_text())["nav"]) | linked(Path("README.md"))
    two = one.union(*(linked(page) for page in one if page.suffix == ".md"))
    folders = {path / "README.md" for path in two}
    assert [str(page) for page in BUILD["pages"]() if page not in two | folders] == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="zensical is not installed (extra docs)")
def test_the_site_is_built_and_its_anchors_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["build.py"])
    assert BUILD["main"](tmp_path) == 0
    assert (tmp_path / "pages" / "docs" / "errors" / "H013.html").is_file()
