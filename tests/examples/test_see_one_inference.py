"""The page for those who are new: each command and program shows the output that stands below it."""

import math
import re
import shlex
from functools import partial

import pytest

import reference_engine.cli
from harness.cli.main import run

from ..documentation import ROOT, Page

PAGE = Page("see-one-inference")
STEPS = re.findall(r"^```(sh|python)\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE.text, flags=re.DOTALL | re.MULTILINE)
STATUS = {"harness faults --check wrong-block": 1}
NOISE = ("harness diff", "harness faults")
"""Commands that show rounding errors: kernels of other machines add up in other orders."""
_NUMBER = re.compile(r"(-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?)")


def is_alike(shown, actual, rel_tol):
    """Whether two lines are equal but for spaces, bars, and the last digits of numbers."""
    parts = [_NUMBER.split(" ".join(re.sub("[█▏▎▍▌▋▊▉]", "", line).split())) for line in (shown, actual)]
    if len(parts[0]) != len(parts[1]):
        return False
    one, two = ([part.strip() for part in side[::2]] for side in parts)
    numbers = [[float(number.replace(",", "")) for number in side[1::2]] for side in parts]
    return one == two and all(map(partial(math.isclose, rel_tol=rel_tol), *numbers))


def missing(shown, actual, rel_tol):
    """Return the lines of the page that the output does not have in this order."""
    rest, lines = (
        iter(actual.replace(f"{ROOT}/", "").splitlines()),
        [line for line in shown.splitlines() if line != "..."],
    )
    return [line for line in lines if not any(is_alike(line, candidate, rel_tol) for candidate in rest)]


@pytest.fixture
def follow(tmp_path, monkeypatch, capsys, checkpoints):
    """Follow steps of the page in a folder that has the checkpoints."""
    (tmp_path / "cases").symlink_to(checkpoints.parent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def followed(steps):
        for language, text, shown in steps:
            capsys.readouterr()
            if language == "python":
                exec(compile(text, "see-one-inference", "exec"), {"__name__": "page"})
            else:
                program, *arguments = shlex.split(text)
                status = {"harness": run, "reference-engine": reference_engine.cli.run}[program](arguments)
                assert status == STATUS.get(text.strip(), 0), text
            assert missing(shown, capsys.readouterr().out, 0.75 if text.startswith(NOISE) else 0.02) == [], text

    return followed


def test_the_page_has_a_path():
    commands = [text for language, text, _ in STEPS if language == "sh"]
    assert len(commands) >= 10
    assert len(STEPS) == len(PAGE.blocks("sh")) + len(PAGE.blocks("python"))


def test_the_first_steps_show_what_the_page_says(follow):
    follow(STEPS[:3])


@pytest.mark.slow
def test_the_whole_page_shows_what_it_says(follow):
    follow(STEPS)


@pytest.mark.parametrize(
    ("shown", "actual", "is_same"),
    [("a 1.00 b", "a  1.01 b", True), ("a 1.00 b", "a 1.1 b", False), ("a 1 b", "a 1 c", False), ("x", "x 1", False)],
)
def test_lines_are_alike(shown, actual, is_same):
    assert is_alike(shown, actual, 0.02) is is_same
