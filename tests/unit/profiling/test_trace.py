"""The trace pass: files that viewers open, spans of the taps' names, and an engine that is left as it was."""

import gzip
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from harness.errors import Code, HarnessError
from harness.profiling.load import dry_run, run_steps
from harness.profiling.trace.tables import read_events, tables
from harness.profiling.tracing import trace

ABOUT = {"revision": "abc", "config": {"path": 'a\\b "c"'}}


def problems_of(path: Path) -> list[str]:
    """Return what torch's own validator says of a trace; older versions of torch have none, and no file fails there."""
    if find_spec("torch.profiler._trace_validator") is None:
        return []
    from torch.profiler._trace_validator import validate_trace

    _, problems = validate_trace(str(path))
    return list(problems)


def is_profiling() -> bool:
    return torch._C._autograd._profiler_enabled()


def run(session, window, folder):
    return trace(session, window, folder, worker="x-decode-r0", device="cpu", about=ABOUT)


def load_json(path):
    with gzip.open(path, "rt") as file:
        return json.load(file)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_trace_is_valid_and_says_what_it_is_of(session, find_window, tmp_path, phase):
    window = find_window(session, phase)
    (path,) = run(session, window, tmp_path)
    assert re.fullmatch(r"x-decode-r0\.\d+\.pt\.trace\.json\.gz", path.name)
    assert problems_of(path) == []
    document = load_json(path)
    assert document["harness"] == {"revision": "abc", "config": {"path": "a/b 'c'"}}
    annotations = [event["name"] for event in document["traceEvents"] if event.get("cat") == "user_annotation"]
    assert [name for name in annotations if "[" in name] == [step.shape.label for step in window.steps]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_operation_has_its_spans(session, find_window, tmp_path, phase):
    window = find_window(session, phase)
    (path,) = run(session, window, tmp_path)
    events = read_events(path)
    planned = [name for step in window.steps for name in step.names]
    names = {node.name for step in events.steps for node in step.walk()}
    assert set(planned) <= names
    phase_tables = tables(events, set(planned))
    rows = {row.name: row for row in phase_tables.operations}
    assert rows["attention"].calls == 3 * len(window.steps)
    assert 0.5 < phase_tables.attributed_share <= 1
    assert sum(row.share for row in phase_tables.operations) == pytest.approx(1)
    assert sum(row.share for row in phase_tables.layers) == pytest.approx(1)
    assert sum(row.num_collapsed for row in phase_tables.layers if row.name.startswith("model.layers.")) == 3
    assert {row.name for row in phase_tables.operators} >= {"aten::mm", "aten::mul"}
    assert not {row.name for row in phase_tables.operators} & names & set(planned)


def test_cycles_are_files_of_their_own(reference, find_window, tmp_path):
    window = find_window(reference, "prefill", repeat=2, wait=0, warmup=0)
    paths = run(reference, window, tmp_path)
    assert len(set(paths)) == 2
    assert [len(read_events(path).steps) for path in paths] == [1, 1]


def test_a_running_profiler_is_left_alone(reference, find_window, tmp_path):
    window = find_window(reference, "decode")
    with profile(activities=[ProfilerActivity.CPU]) as others:
        with pytest.raises(HarnessError, match="a profiler is running already") as caught:
            run(reference, window, tmp_path)
        torch.ones(3).sum()
    assert caught.value.code is Code.RECORDER_RUNNING
    assert "aten::sum" in {event.key for event in others.key_averages()}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["start", "step", "export_chrome_trace"])
def test_a_profiler_that_fails_leaves_everything_as_it_was(session, find_window, tmp_path, monkeypatch, method):
    window = find_window(session, "decode")

    def fail(*_args, **_kwargs):
        raise RuntimeError("no space left")

    monkeypatch.setattr(profile, method, fail)
    with pytest.raises(HarnessError, match="profiling failed with RuntimeError: no space left") as caught:
        run(session, window, tmp_path)
    monkeypatch.undo()
    assert caught.value.code is Code.PROFILER_FAILED
    assert not is_profiling()
    assert dry_run(session, window.load)[: window.num_steps] == (*window.before, *window.steps)
    run(session, window, tmp_path)


def test_an_engine_that_fails_ends_the_profiler(reference, find_window, tmp_path, monkeypatch):
    window = find_window(reference, "decode")

    class BrokenError(Exception):
        pass

    def fail():
        raise BrokenError

    with monkeypatch.context() as patch:
        patch.setattr(reference, "step", fail)
        with pytest.raises(BrokenError):
            run(reference, window, tmp_path)
    assert not is_profiling()
    run_steps(reference, window.load, lambda _index: reference.step())


@pytest.mark.parametrize("content", [b"", b"{", b'{"traceEvents": []}', b"[]"])
def test_a_trace_that_cannot_be_used_is_an_error(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(HarnessError) as caught:
        read_events(path)
    assert caught.value.code is Code.PROFILER_FAILED


def event(name, ts, dur, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "pid": 1, "args": args}


def test_kernels_are_charged_to_the_operation_that_launched_them(tmp_path):
    """What a trace of a GPU looks like: kernels run later and elsewhere."""
    path = tmp_path / "a.json"
    events = [
        event("engine.step", 0, 100),
        event("model.layers.0", 10, 80),
        event("model.layers.0.mlp.act", 10, 30),
        event("aten::mul", 12, 20),
        event("cudaLaunchKernel", 15, 5, "cuda_runtime", correlation=7),
        event("model.layers.0.output", 45, 40),
        event("cudaLaunchKernel", 50, 5, "cuda_runtime", correlation=8),
        event("mul_kernel", 200, 33, "kernel", tid=9, correlation=7),
        event("add_kernel", 240, 11, "kernel", tid=9, correlation=8),
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    phase_tables = tables(read_events(path), {"model.layers.0.mlp.act", "model.layers.0.output"})
    assert [(row.name, row.total_us, row.device_us) for row in phase_tables.operations] == [
        ("mlp.act", 30, 33),
        ("output", 40, 11),
        ("unattributed", 30, 0),
    ]
    assert [(row.name, row.device_us) for row in phase_tables.layers] == [("model.layers.0", 44), ("unattributed", 0)]
    assert phase_tables.layers[-1].total_us == 20
    assert [(row.name, row.self_us, row.device_us) for row in phase_tables.operators] == [("aten::mul", 20, 33)]
    assert phase_tables.attributed_share == 0.7


def test_only_identical_layers_share_a_row(tmp_path):
    path = tmp_path / "a.json"
    events = [event("engine.step", 0, 100)]
    for layer, operators in enumerate([["aten::mm"], ["aten::mm"], ["aten::mm", "aten::clone"]]):
        start = 10 + 20 * layer
        events += [event(f"model.layers.{layer}", start, 10 + layer), event(f"model.layers.{layer}.output", start, 9)]
        events += [event(name, start + 1 + at, 1) for at, name in enumerate(operators)]
    path.write_text(json.dumps({"traceEvents": events}))
    phase_tables = tables(read_events(path), {f"model.layers.{layer}.output" for layer in range(3)})
    assert [(row.name, row.num_collapsed, row.spread) for row in phase_tables.layers[:-1]] == [
        ("model.layers.0-1", 2, (10, 11)),
        ("model.layers.2", 1, (12, 12)),
    ]
