"""Pages with one short program each, run in this process."""

import json
import sqlite3
import subprocess
import time
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.profiling.trace.summary import summarize

from ..documentation import ROOT, Page, run_python


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


def test_a_database_of_nsight_systems_becomes_a_trace(tmp_path: Path) -> None:
    """A decode step of TensorRT-LLM with a graph of two kernels, and a copy that the host waits for."""
    thread = (77 << 24) | 78
    with closing(sqlite3.connect(tmp_path / "report.sqlite")) as database, database:
        database.executescript("""
            CREATE TABLE StringIds (id, value);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId, demangledName);
            CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, streamId, correlationId, copyKind);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId);
            CREATE TABLE NVTX_EVENTS (start, end, globalTid, text, textId);
        """)
        names = [(1, "nvjet_64x8"), (2, "cudaGraphLaunch_v10000"), (3, "cudaMemcpy_v3020")]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
        kernels = [(2000, 5000, 0, 7, 1, 1), (6000, 9000, 0, 7, 1, 1)]
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?)", kernels)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (9500, 9900, 0, 7, 2, 2)")
        calls = [(1000, 1500, thread, 1, 2), (9000, 10000, thread, 2, 3)]
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", calls)
        step = "[Executor] _forward_step 3: 0 ctx reqs, 4 gen reqs"
        database.execute("INSERT INTO NVTX_EVENTS VALUES (500, 10500, ?, ?, NULL)", (thread, step))
    Page("traces").write_files(tmp_path)
    ran = run_python(tmp_path, "nsight_to_trace.py", "report.sqlite", "trace.json")
    assert ran.returncode == 0, ran.stderr
    summary = summarize(tmp_path / "trace.json")
    (read,) = summary.steps
    assert (read.phase, read.size) == ("decode", "4 requests")
    assert {name: read.figures[name] for name in ("launches", "graph launches", "kernels", "waiting calls")} == {
        "launches": 2, "graph launches": 1, "kernels": 3, "waiting calls": 1,
    }  # fmt: skip
    assert (read.figures["step us"], read.figures["GEMM us"], read.figures["copy us"]) == (10.0, 6.0, 0.4)
