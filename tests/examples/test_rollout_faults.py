"""The training run of docs/rollout-faults.md: a sound pair, and each fault at its term."""

import re

import pytest

from ..documentation import Page, imported

PAGE = Page("rollout-faults")
(SHOWN,) = PAGE.blocks("text")
LINES = {line[:12].strip(): line for line in SHOWN.splitlines()}
DEFAULT = ("sound", "temperature")


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    with imported(PAGE.write_files(tmp_path_factory.mktemp("example")), "gap_example") as module:
        yield module


def without_figures(line: str) -> str:
    """Return a line without the figures that depend on the CPU: the gap, and what a term explains of it."""
    return re.sub(r"[\d.e-]+(?= nats)|(?<=explains )[\d.e-]+", "#", line)


def test_the_page_shows_every_fault(example):
    assert list(LINES) == list(example.FAULTS)


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in LINES]
)
def test_the_gap_goes_to_the_term_that_the_page_shows(example, name):
    assert without_figures(example.line(name, example.compare(name))) == without_figures(LINES[name])
