"""Databases of Nsight Systems: `nsys export --type sqlite report.nsys-rep`.

Kernels, copies, whole replays of graphs, calls of the runtime, and ranges of NVTX become the events of a Chrome trace.
The tables are those of NVIDIA's documentation of the exporter; a report has those of what was recorded.
"""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from harness.errors import Code, HarnessError
from harness.profiling.trace.columns import NO_CORRELATION, Arguments, Event, Trace, build_trace

_MAGIC = b"SQLite format 3\0"
_BATCH = 1 << 14
"""Events that become columns at once."""
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
"""CUpti_ActivityMemcpyKind."""
_VERSION = re.compile(r"_v\d+$")
"""Of a call: `cudaLaunchKernel_v7000`."""
_ON_DEVICE = "start, end, 'GPU ' || deviceId, streamId, coalesce(globalPid, 0) >> 24 & 0xFFFFFF, correlationId"
_ON_HOST = "start, end, globalTid >> 24 & 0xFFFFFF, globalTid & 0xFFFFFF, globalTid >> 24 & 0xFFFFFF"
_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "kernel",
        f"SELECT coalesce(name.value, 'unknown'), {_ON_DEVICE} FROM CUPTI_ACTIVITY_KIND_KERNEL AS event"
        " LEFT JOIN StringIds AS name ON name.id = event.demangledName",
    ),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (  # recorded in place of its kernels, unless with --cuda-graph-trace=node
        "kernel",
        f"SELECT 'graph ' || graphId, {_ON_DEVICE} FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("gpu_memcpy", f"SELECT copyKind, {_ON_DEVICE} FROM CUPTI_ACTIVITY_KIND_MEMCPY"),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        "gpu_memset",
        f"SELECT 'Memset (Device)', {_ON_DEVICE} FROM CUPTI_ACTIVITY_KIND_MEMSET",
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "cuda_runtime",
        f"SELECT coalesce(name.value, 'unknown'), {_ON_HOST}, correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME AS event"
        " LEFT JOIN StringIds AS name ON name.id = event.nameId",
    ),
    "NVTX_EVENTS": (
        "user_annotation",
        f"SELECT coalesce(text, name.value, ''), {_ON_HOST}, {NO_CORRELATION} FROM NVTX_EVENTS AS event"
        " LEFT JOIN StringIds AS name ON name.id = event.textId WHERE end IS NOT NULL",
    ),
}
"""The category of a table's events; a query of name, begin and end in nanoseconds, process, thread or stream,
process on the host, correlation."""


def is_nsight(path: Path) -> bool:
    """Whether a file is a database of SQLite."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_nsight(path: Path) -> Trace:
    """Read a database of Nsight Systems.

    Raises:
        HarnessError: TRACE_DAMAGED; TRACE_UNREADABLE: it is locked; NO_TRACE_EVENTS: a database of something else, or
            without an event.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", timeout=1.0, uri=True)) as database:
            names = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            chosen = [table for table in _TABLES if table in names]
            num_events = sum(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in chosen)
            if not num_events:
                what = "the database is no report of Nsight Systems with kernels, calls or ranges"
                hint = "nsys profile --trace=cuda,nvtx ..., then nsys export --type sqlite"
                raise HarnessError(Code.NO_TRACE_EVENTS, what, where=path, expected=", ".join(_TABLES), hint=hint)
            devices = database.execute("SELECT name FROM TARGET_INFO_GPU") if "TARGET_INFO_GPU" in names else ()
            device_names = [str(name) for (name,) in devices]
            batches = (batch for table in chosen for batch in _batches(database, *_TABLES[table]))
            open_ranges = "SELECT count(*) FROM NVTX_EVENTS WHERE end IS NULL"
            num_open = database.execute(open_ranges).fetchone()[0] if "NVTX_EVENTS" in names else 0
            left_out = {"marks, and ranges without an end": num_open}
            return build_trace(batches, num_events=num_events, device_names=device_names, left_out=left_out)
    except (sqlite3.Error, ValueError, OverflowError, TypeError) as error:
        if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            what = "another program writes to the database"
            raise HarnessError(Code.TRACE_UNREADABLE, what, where=path, hint="wait until it has ended") from error
        what = f"the database of Nsight Systems cannot be read: {error}"
        raise HarnessError(Code.TRACE_DAMAGED, what, where=path, hint="export it again, with --type sqlite") from error


def _batches(database: sqlite3.Connection, category: str, query: str) -> Iterator[list[Event]]:
    cursor = database.execute(query)
    while rows := cursor.fetchmany(_BATCH):
        yield [_event(category, *row) for row in rows]


def _event(
    category: str,
    name: str | int,
    begin_ns: int,
    end_ns: int,
    process: int | str,
    thread: int,
    host_process: int,
    correlation: int,
) -> Event:
    """Return an event. Processes number their streams and launches alike, so both are told apart by the process."""
    above = host_process << 32  # both numbers have 32 bits
    return Event(
        ph="X",
        cat=category,
        name=f"Memcpy {_COPIES.get(name, name)}" if isinstance(name, int) else _VERSION.sub("", name),
        pid=process,
        tid=thread + above,
        ts=begin_ns / 1e3,
        dur=(end_ns - begin_ns) / 1e3,
        args=Arguments(correlation=correlation if correlation == NO_CORRELATION else correlation + above),
    )
