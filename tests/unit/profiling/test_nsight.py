"""Databases of Nsight Systems, built by hand from the schema of NVIDIA's documentation."""

import sqlite3
from contextlib import closing

import pytest

from harness.errors import Code, HarnessError
from harness.profiling.trace.file import read_trace, trace_files
from harness.profiling.trace.nesting import flame
from harness.profiling.trace.summary import summarize
from harness.report.trace import summary_text

THREAD = (77 << 24) | 78
PROCESS = 77 << 24
ON_DEVICE = "start, end, deviceId, streamId, globalPid, correlationId"
SCHEMA = f"""
    CREATE TABLE StringIds (id, value);
    CREATE TABLE TARGET_INFO_GPU (id, name);
    CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({ON_DEVICE}, demangledName);
    CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ({ON_DEVICE}, graphId);
    CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({ON_DEVICE}, copyKind);
    CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId);
    CREATE TABLE NVTX_EVENTS (start, end, globalTid, text, textId);
"""
STEP = "[Executor] _forward_step 3: 0 ctx reqs, 4 gen reqs"
KERNELS = [(2000, 5000, 0, 7, PROCESS, 1, 1), (6000, 9000, 0, 7, PROCESS, 1, 1)]
GRAPH = [(2000, 9000, 0, 7, PROCESS, 1, 42)]


def report(path, *, kernels=(), graphs=(), step=(STEP, None)):
    """Write a decode step of TensorRT-LLM that launches a graph, and a copy that the host waits for."""
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(SCHEMA)
        names = [(1, "nvjet_64x8"), (2, "cudaGraphLaunch_v10000"), (3, "cudaMemcpy_v3020"), (4, STEP)]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
        database.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H200')")
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?)", kernels)
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, ?, ?, ?, ?, ?)", graphs)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (9500, 9900, 0, 7, ?, 2, 2)", (PROCESS,))
        calls = [(1000, 1500, THREAD, 1, 2), (9000, 10000, THREAD, 2, 3)]
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", calls)
        database.execute("INSERT INTO NVTX_EVENTS VALUES (500, 10500, ?, ?, ?)", (THREAD, *step))
        database.execute("INSERT INTO NVTX_EVENTS VALUES (700, NULL, ?, 'a mark', NULL)", (THREAD,))
    return path


@pytest.mark.parametrize("step", [(STEP, None), (None, 4)], ids=["text", "registered text"])
@pytest.mark.parametrize(
    ("recorded", "num_kernels", "busy_us"),
    [({"kernels": KERNELS}, 3, 6.4), ({"graphs": GRAPH}, 2, 7.4)],
    ids=["nodes", "whole graphs"],
)
def test_a_step_has_its_launches_and_kernels(tmp_path, recorded, num_kernels, busy_us, step):
    summary = summarize(report(tmp_path / "report.sqlite", **recorded, step=step))
    (read,) = summary.steps
    assert (read.phase, read.size) == ("decode", "4 requests")
    assert {name: read.figures[name] for name in ("launches", "graph launches", "kernels", "waiting calls")} == {
        "launches": 2, "graph launches": 1, "kernels": num_kernels, "waiting calls": 1,
    }  # fmt: skip
    assert (read.figures["step us"], read.figures["device busy us"]) == pytest.approx((10.0, busy_us))
    assert read.figures["copy us"] == 0.4


def test_processes_that_number_their_launches_alike_are_told_apart(tmp_path):
    path, second = report(tmp_path / "report.sqlite", kernels=KERNELS), 88 << 24
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (20000, 20500, ?, 1, 2)", (second | 88,))
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (21000, 22000, 0, 7, ?, 1, 1)", (second,))
    summary = summarize(path)
    (device,) = summary.devices
    assert (device.launches.num_launches, device.launches.num_unknown, len(device.idle)) == (3, 0, 2)
    assert summary.steps[0].figures["kernels"] == 3, "the kernel of the other process is in no step of this one"


def two_ranks(path, *, late_us):
    """Write four steps of two ranks, each with a collective that the second rank joins late."""
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(SCHEMA)
        names = [(1, "ncclDevKernel_AllReduce_Sum_bf16"), (2, "cudaLaunchKernel_v7000"), (4, STEP)]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
        for step in range(4):
            begin, end = 100_000 * step, 100_000 * step + 50_000
            for rank in (0, 1):
                process, joined = 77 + rank << 24, begin + 2000 + 1000 * rank * late_us
                ranges = (begin, end, process | 1, None, 4)
                database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?)", ranges)
                call = (begin + 1000, begin + 2000, process | 1, step, 2)
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", call)
                kernel = (joined, end, rank, 7, process, step, 1)
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?)", kernel)
    return path


def test_ranks_of_one_report_are_told_apart(tmp_path):
    summary = summarize(two_ranks(tmp_path / "report.sqlite", late_us=8))
    assert [device.name for device in summary.devices] == ["GPU 0", "GPU 1"]
    assert [step.process for step in summary.steps] == ["77", "78"] * 4
    assert {step.figures["step us"] for step in summary.steps} == {50.0}, "a rank's step hides no other rank's"
    assert {step.figures["between steps us"] for step in summary.steps[2:]} == {50.0}
    text = summary_text([summary])
    assert "the steps, times and operators are sums over 2 processes" in text
    assert "in 4 collectives that all have, ranks wait for report.sqlite GPU 1, up to 0.03 ms" in text


def test_calls_of_a_database_are_a_flame_graph(tmp_path):
    root = flame(report(tmp_path / "report.sqlite", kernels=KERNELS))
    assert set(root.children[STEP].children) == {"cudaGraphLaunch", "cudaMemcpy"}


def test_a_database_names_its_cards(tmp_path):
    path = report(tmp_path / "report.sqlite", kernels=KERNELS)
    assert trace_files([tmp_path]) == [path]
    assert read_trace(path).device_names == ("NVIDIA H200",)


def damaged(path):
    report(path, kernels=KERNELS)
    path.write_bytes(path.read_bytes()[:9000])


def of_another_program(path):
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE users (id)")


@pytest.mark.parametrize(
    ("write", "code"),
    [
        (damaged, Code.TRACE_DAMAGED),
        (of_another_program, Code.NO_TRACE_EVENTS),
        (lambda path: report(path, kernels=[(None, 5000, 0, 7, PROCESS, 1, 1)]), Code.TRACE_DAMAGED),
        (lambda path: report(path, kernels=[(2**62, 2**63 - 1, 0, 7, PROCESS, 1, 1)]), Code.TRACE_DAMAGED),
        (lambda path: report(path, kernels=[(1, 2, 0, 7, PROCESS, "x", 1)]), Code.TRACE_DAMAGED),
        (lambda path: report(path, kernels=[(1, 2, 0, 7, PROCESS, 1, 1)], step=(b"blob", None)), Code.TRACE_DAMAGED),
    ],
    ids=["cut off", "another program", "no time", "no year", "no number", "no text"],
)
def test_what_cannot_be_read_is_refused(tmp_path, write, code):
    write(tmp_path / "report.sqlite")
    with pytest.raises(HarnessError) as refused:
        read_trace(tmp_path / "report.sqlite")
    assert refused.value.code == code


def test_a_database_that_is_being_written_is_not_waited_for(tmp_path):
    path = report(tmp_path / "report.sqlite", kernels=KERNELS)
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        with pytest.raises(HarnessError, match="another program writes to the database") as refused:
            read_trace(path)
    assert refused.value.code is Code.TRACE_UNREADABLE


def test_marks_are_left_out_and_told(tmp_path):
    assert summarize(report(tmp_path / "report.sqlite")).left_out == ("1 marks, and ranges without an end",)
