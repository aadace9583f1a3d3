"""The page of explanations has those of the extensions, too."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "explanations.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def with_tables():
    return runpy.run_path(str(DOCS / "site" / "explanations.py"))["with_tables"]


def test_the_page_has_the_tables_of_the_docstrings(with_tables):
    assert with_tables(PAGE) == PAGE, "run `python docs/site/explanations.py`"


def test_an_explanation_is_in_a_table(with_tables):
    with pytest.raises(ValueError, match=r"no table is of norms.py$"):
        with_tables(PAGE.replace("| function in `norms.py` | causes |", ""))
