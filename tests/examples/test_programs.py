"""Pages with one short program each, run in this process."""

import time
from itertools import count
from pathlib import Path

import pytest

from ..documentation import ROOT, Page


@pytest.mark.parametrize("page", ["check-any-engine", "fuzz", "gates", "generate", "rollouts"])
def test_the_program_of_a_page_runs(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = Page(page).blocks("python")
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 1e-3)  # no real clock decides a test
    exec(compile(program, f"docs/{page}.md", "exec"), {"__name__": page})
    assert bool(capsys.readouterr().out) == ("print(" in program)
