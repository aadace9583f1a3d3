"""Pages with one short program each, run in this process."""

import json
import subprocess
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize(("slowdown", "status"), [(1.0, 0), (1.2, 4)])
def test_two_servers_are_compared_in_turns(
    slowdown: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command is replaced by one that is so much slower on the second server."""
    runs = list[str]()

    def run(command: list[str], **_: object) -> SimpleNamespace:
        url = command[command.index("--endpoint") + 1]
        runs.append(url[-1])
        time_ms = (100.0 + len(runs) % 3) * (slowdown if url.endswith("1") else 1.0)
        times = {name: {"p50": time_ms} for name in ("ttft", "tpot", "e2e")}
        rates = {"new_tokens_per_s": 1e3 / time_ms, "requests_per_s": 10 / time_ms}
        return SimpleNamespace(returncode=0, stdout=json.dumps({"times_ms": times, **rates}))

    monkeypatch.setattr(subprocess, "run", run)
    (program,) = Page("load").blocks("python")
    with pytest.raises(SystemExit) as ended:
        exec(compile(program, "docs/load.md", "exec"), {"__name__": "load"})
    assert "".join(runs) == "0110" * 5
    assert ended.value.code == status
    assert ("slower" in capsys.readouterr().out) == (status == 4)
