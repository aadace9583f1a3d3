"""Traces that others made: nesting, kernels, files that are no trace, and what changed between two."""

import gzip
import json
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.errors import Code, HarnessError
from harness.profiling.trace import file as trace_file
from harness.profiling.trace.compare import diff_traces
from harness.profiling.trace.file import read_trace
from harness.profiling.trace.summary import summarize
from harness.results.trace import TraceSummary


def event(name: str, begin: float, duration: float, **fields: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": duration} | fields


def written(path: Path, *events: dict[str, Any]) -> TraceSummary:
    path.write_text(json.dumps({"traceEvents": events}))
    return summarize(path)


def own_times(summary: TraceSummary) -> dict[str, float]:
    return {operator.name: operator.self_us for operator in summary.operators}


def test_events_of_two_threads_are_not_nested(tmp_path: Path) -> None:
    summary = written(tmp_path / "t", event("outer", 0, 10), event("beside", 2, 4, tid=2), event("inner", 5, 3))
    assert own_times(summary) == {"outer": 7, "beside": 4, "inner": 3}


def test_times_rounded_to_microseconds_nest_the_next_event_nowhere(tmp_path: Path) -> None:
    """The second begins where the first ends; the third lasts beyond the second, which loses the part inside."""
    summary = written(tmp_path / "t", event("first", 0, 5), event("second", 5, 5), event("third", 9, 2))
    assert own_times(summary) == {"first": 5, "second": 4, "third": 2}
    assert summary.duration_us == 11


def test_a_recursive_operator_is_counted_twice_and_timed_once(tmp_path: Path) -> None:
    (operator,) = written(tmp_path / "t", event("div_", 0, 10), event("div_", 2, 6)).operators
    assert (operator.count, operator.total_us, operator.self_us) == (2, 16, 10)


def test_a_kernel_belongs_to_the_phase_that_launched_it(tmp_path: Path) -> None:
    def step(name: str, begin: float) -> dict[str, Any]:
        return event(f"{name}[bs=1 toks=1 kv=8]", begin, 10, cat="user_annotation")

    def launch(begin: float, number: int) -> dict[str, Any]:
        return event("cudaLaunchKernel", begin, 1, cat="cuda_runtime", args={"correlation": number})

    def kernel(begin: float, number: int) -> dict[str, Any]:
        return event("gemm", begin, 4, cat="kernel", pid=0, tid=7, args={"correlation": number})

    summary = written(
        tmp_path / "t",
        step("prefill", 0), launch(2, 1), step("decode", 20), launch(22, 2),
        kernel(21, 1), kernel(40, 2), kernel(50, 3),
    )  # fmt: skip
    assert [(phase.name, phase.count, phase.total_us) for phase in summary.phases] == [
        ("prefill", 1, 10),
        ("decode", 1, 10),
    ]
    kernels = {operator.phase: operator.count for operator in summary.operators if operator.device == "gpu"}
    assert kernels == {"prefill": 1, "decode": 1, None: 1}


def test_a_trace_of_another_program(tmp_path: Path) -> None:
    """Every event is counted, and the own times of all operators fill the outermost ones."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    path = tmp_path / "theirs.pt.trace.json"
    with torch.profiler.profile() as profiler, torch.profiler.record_function("forward"):
        model(torch.ones(2, 8))
    profiler.export_chrome_trace(str(path))
    events = [event_read for event_read in json.loads(path.read_text())["traceEvents"] if event_read["ph"] == "X"]
    summary = summarize(path)
    expected = Counter(event_read["name"] for event_read in events if event_read["cat"] == "cpu_op")
    assert {operator.name: operator.count for operator in summary.operators} == expected
    assert expected["aten::addmm"] == 2
    assert {operator.phase for operator in summary.operators} == {"forward"}
    assert summary.operations == ()
    path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
    assert summarize(path.with_suffix(".gz")).operators == summary.operators


def test_a_list_of_functions_is_a_trace(tmp_path: Path) -> None:
    """What the other exporter of torch writes: no `traceEvents`, no categories."""
    with torch.autograd.profiler.profile(use_kineto=True) as profiler:
        torch.nn.functional.linear(torch.ones(2, 8), torch.ones(4, 8))
    path = tmp_path / "functions.json"
    assert profiler.function_events is not None
    profiler.function_events.export_chrome_trace(str(path))
    assert path.read_text().startswith("[")
    assert {"aten::linear", "aten::t", "aten::matmul"} <= own_times(summarize(path)).keys()


def test_categories_of_older_versions(tmp_path: Path) -> None:
    (operator, kernel) = written(
        tmp_path / "t",
        event("decode[bs=1 toks=1 kv=8]", 0, 10, cat="user_annotation"),
        event("aten::mm", 1, 8, cat="Operator"),
        event("cudaLaunchKernel", 2, 1, cat="Runtime", args={"correlation": 5}),
        event("gemm", 20, 4, cat="Kernel", pid=0, tid="stream 7", args={"correlation": 5}),
    ).operators
    assert (operator.name, operator.device, operator.self_us) == ("aten::mm", "cpu", 8)
    assert (kernel.name, kernel.device, kernel.phase) == ("gemm", "gpu", "decode")


def test_own_time_passes_over_what_is_no_operator(tmp_path: Path) -> None:
    frames = [event(f"frame {depth}", 2 + depth, 30 - 2 * depth, cat="python_function") for depth in range(5)]
    summary = written(tmp_path / "t", event("outer", 0, 40), *frames, event("inner", 10, 15))
    assert own_times(summary) == {"outer": 25, "inner": 15}


def test_of_annotations_inside_one_another_the_inner_one_is_the_phase(tmp_path: Path) -> None:
    summary = written(
        tmp_path / "t",
        event("ProfilerStep#3", 0, 50, cat="user_annotation"),
        event("forward", 10, 20, cat="user_annotation"),
        event("ProfilerStep#4", 60, 50, cat="user_annotation"),
        event("in", 15, 1), event("after", 40, 1), event("other", 12, 1, pid=2),
    )  # fmt: skip
    assert [(phase.name, phase.count) for phase in summary.phases] == [("ProfilerStep", 2), ("forward", 1)]
    assert {operator.name: operator.phase for operator in summary.operators} == {
        "in": "forward",
        "after": "ProfilerStep",
        "other": None,
    }


def test_an_empty_list_of_events_is_a_trace(tmp_path: Path) -> None:
    assert written(tmp_path / "t").duration_us == 0


def test_the_furthest_times_that_are_taken_do_not_overflow(tmp_path: Path) -> None:
    summary = written(tmp_path / "t", event("first", -3e15, 1), event("last", 3e15, 3e15))
    assert summary.duration_us == pytest.approx(9e15)
    assert own_times(summary) == {"first": 1, "last": pytest.approx(3e15)}


def test_a_negative_duration_counts_as_none(tmp_path: Path) -> None:
    summary = written(tmp_path / "t", event("a", 3, -2), event("b", 3, 1))
    assert own_times(summary) == {"a": 0, "b": 1}
    assert summary.left_out == ("1 events that end before they begin, and count as none",)


def test_events_in_two_halves_are_left_out_and_told(tmp_path: Path) -> None:
    halves = [{"ph": kind, "name": "a", "pid": 1, "tid": 1, "ts": 1.0} for kind in "BEbeiM"]
    summary = written(tmp_path / "t", event("whole", 0, 1), *halves)
    assert (summary.num_events, summary.left_out) == (7, ("4 events that are a begin or an end alone",))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", Code.TRACE_DAMAGED),
        (" \n", Code.TRACE_DAMAGED),
        ('{"traceEvents": [{"ph": "X", "na', Code.TRACE_DAMAGED),
        ("[]", Code.NO_TRACE_EVENTS),
        ('[{"name": "a"}]', Code.NO_TRACE_EVENTS),
        ("7", Code.NO_TRACE_EVENTS),
        ("{}", Code.NO_TRACE_EVENTS),
        ('{"traceEvents": 7}', Code.NO_TRACE_EVENTS),
        ('{"traceEvents": [7]}', Code.NO_TRACE_EVENTS),
        ('{"traceEvents": [{"ph": "X", "name": 7}]}', Code.NO_TRACE_EVENTS),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": "now"}]}', Code.NO_TRACE_EVENTS),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": 1e300}]}', Code.NO_TRACE_EVENTS),
        ('{"traceEvents": [{"ph": "X", "name": "a", "args": {"correlation": 1e30}}]}', Code.NO_TRACE_EVENTS),
        ('{"traceEvents": [{"ph": "X", "ts": NaN}]}', Code.TRACE_NOT_JSON),
        ("[" * 100_000, Code.NO_TRACE_EVENTS),
        ('{"traceEvents": [{"args": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}]}", Code.TRACE_NOT_JSON),
        ("\x00\x01", Code.TRACE_NOT_JSON),
        ('{"traceEvents": []} more', Code.TRACE_NOT_JSON),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, code: Code) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(HarnessError) as caught:
        summarize(path)
    assert caught.value.code is code
    assert str(path) in str(caught.value)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'{"traceEvents": [{"ph": "X", "name": "\xff"}]}')
    with pytest.raises(HarnessError, match="UTF-8") as caught:
        summarize(path)
    assert caught.value.code is Code.TRACE_NOT_JSON


def test_a_compressed_trace_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": []}' * 100)[:-10])
    with pytest.raises(HarnessError, match="cut off") as caught:
        summarize(path)
    assert caught.value.code is Code.TRACE_DAMAGED


def test_changes_of_count_come_before_those_of_time(tmp_path: Path) -> None:
    before = written(tmp_path / "a", event("slow", 0, 100), event("often", 200, 1), event("same", 300, 1))
    after = written(
        tmp_path / "b", event("slow", 0, 190), event("often", 200, 1), event("often", 210, 1), event("same", 300, 1)
    )
    changes = [(change.name, change.is_of_count) for change in diff_traces(before, after).changes]
    assert changes == [("often", True), ("slow", False)]


def test_a_trace_is_read_without_torch():
    program = "import sys, harness.profiling.trace.summary, harness.report.trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0, "it takes seconds to import"


NESTED = {"stack": [{"a": 1}, {"b": [{"c": 2}, {"d": 3}]}], "text": '}, {"ph": "X"'}
"""Objects within an event, whose ends are not those of events."""
LONG = [event(f"aten::{number}", 10 * number, 5) | {"args": NESTED} for number in range(200)]
STATED = {"distributedInfo": {"rank": 3}, "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}]}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    "content",
    [STATED | {"traceEvents": LONG}, {"traceEvents": LONG} | STATED, {"other": {"traceEvents": []}} | STATED
     | {"traceEvents": LONG}, LONG, {"traceEvents": LONG, "displayTimeUnit": "ms"}],
    ids=["stated first", "stated last", "another array first", "list", "not stated"],
)  # fmt: skip
@pytest.mark.parametrize("piece_bytes", [64, 300, 4096])
def test_a_trace_is_the_same_in_pieces(tmp_path: Path, monkeypatch, content, indent, compress, piece_bytes) -> None:
    text = json.dumps(content, indent=indent).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(text) if compress else text)
    whole = read_trace(path)
    monkeypatch.setattr(trace_file, "_PIECE_BYTES", piece_bytes)
    in_pieces = read_trace(path)
    assert (in_pieces.rank, in_pieces.device_names) == (whole.rank, whole.device_names)
    assert (in_pieces.labels, in_pieces.num_events) == (whole.labels, 200)
    for name in ("label", "start_ns", "duration_ns", "thread", "correlation"):
        assert np.array_equal(getattr(in_pieces, name), getattr(whole, name))


def test_what_is_wrong_is_told_of_the_trace_and_not_of_its_piece(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(trace_file, "_PIECE_BYTES", 1000)
    path = tmp_path / "trace.json"
    text = json.dumps({"traceEvents": LONG})
    path.write_text(json.dumps({"traceEvents": [*LONG[:150], {"ph": 7}, *LONG[150:]]}))
    with pytest.raises(HarnessError, match=r"got `int` - at `event 150\.ph`"):
        read_trace(path)
    path.write_text(f"{text[:9000]}\x01{text[9000:]}")
    with pytest.raises(HarnessError, match=r"\(byte 9000\)") as refused:
        read_trace(path)
    assert refused.value.code is Code.TRACE_NOT_JSON
    path.write_text(text[:-700])
    with pytest.raises(HarnessError, match="cut off: the JSON ends in the middle"):
        read_trace(path)


def test_the_memory_does_not_grow_with_the_text(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(trace_file, "_PIECE_BYTES", 1 << 16)
    path = tmp_path / "trace.json"
    padded = [event("aten::mm", 10 * number, 5) | {"args": {"unknown": "x" * 4000}} for number in range(2000)]
    path.write_text(json.dumps({"traceEvents": padded}))
    tracemalloc.start()
    try:
        read_trace(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 8
