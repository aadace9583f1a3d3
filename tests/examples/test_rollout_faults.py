"""The training run of docs/rollout-faults.md: a sound pair, and each fault at its term."""

import importlib
import re
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "rollout-faults.md").read_text()
(SHOWN,) = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
LINES = {line[:12].strip(): line for line in SHOWN.splitlines()}
DEFAULT = ("sound", "temperature")


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    folder = tmp_path_factory.mktemp("example")
    (program,) = re.findall(r"```python title=gap_example.py\n(.*?)```", PAGE, flags=re.DOTALL)
    (folder / "gap_example.py").write_text(program)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(folder)
    yield importlib.import_module("gap_example")
    patch.undo()
    del sys.modules["gap_example"]


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
