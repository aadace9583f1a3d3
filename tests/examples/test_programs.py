"""Pages with one short program each, run in this process."""

import re
import time
from itertools import count
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["check-any-engine", "fuzz", "gates", "generate", "rollouts"])
def test_the_program_of_a_page_runs(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 1e-3)  # no real clock decides a test
    exec(compile(program, f"docs/{page}.md", "exec"), {"__name__": page})
    assert bool(capsys.readouterr().out) == ("print(" in program)
