"""Traces and snapshots that others made: our counts beside those of a plain script, and the peers' seconds and memory.

    python tests/benchmarks/trace_public.py --peers PYTHON TRACE...

PYTHON is an interpreter of an environment with HolisticTraceAnalysis (and pandas below 3) and TraceLens. Each reader is
a process of its own; the plain script is `json` and loops, and knows nothing of ours.
"""

import argparse
import gzip
import json
import os
import pickle
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tabulate import tabulate

OURS = """
import json, sys
from pathlib import Path
from harness.profiling.trace.summary import summarize
summary = summarize(Path(sys.argv[1]))
rows = summary.operators
steps = [(phase.name, phase.count) for phase in summary.phases]
print("RESULT" + json.dumps({
    "events": summary.num_events,
    "operators": sum(row.count for row in rows if row.device == "cpu"),
    "kernels": sum(row.count for row in rows if row.device == "gpu"),
    "kernel us": round(sum(row.total_us for row in rows if row.device == "gpu")),
    "launches": sum(device.num_launches for device in summary.devices),
    "replays": sum(graph.count for device in summary.devices for graph in device.graphs),
    "other us": round(sum(row.total_us for row in rows if row.category == "other")),
    "steps": steps[:3]}))
"""
HTA = """
import gzip, json, sys, tempfile, logging
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
folder, file = tempfile.mkdtemp(), sys.argv[1]
document = json.load(gzip.open(file) if file.endswith(".gz") else open(file))
document.setdefault("distributedInfo", {})["rank"] = 0
json.dump(document, gzip.open(folder + "/rank0.json.gz", "wt", 1))
del document
TraceAnalysis(trace_dir=folder).get_gpu_kernel_breakdown(visualize=False)
"""
TRACELENS = """
import sys
from TraceLens import TreePerfAnalyzer
analyzer = TreePerfAnalyzer.from_file(sys.argv[1])
analyzer.get_df_gpu_timeline(); analyzer.get_df_kernel_launchers()
"""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")


def plain_report(path: Path) -> dict[str, Any]:
    """Count a database of Nsight Systems with queries alone."""
    with closing(sqlite3.connect(path)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}

        def rows(name: str, columns: str) -> list[Any]:
            table = f"CUPTI_ACTIVITY_KIND_{name}"
            return database.execute(f"SELECT {columns} FROM {table}").fetchall() if table in tables else []

        names = dict(database.execute("SELECT id, value FROM StringIds"))
        calls = {number: names[name] for number, name in rows("RUNTIME", "correlationId, nameId")}
        kinds = ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
        device = [row for kind in kinds for row in rows(kind, "end - start, correlationId")]
        num_ranges = (
            database.execute("SELECT count(*) FROM NVTX_EVENTS").fetchone()[0] if "NVTX_EVENTS" in tables else 0
        )
        launching = {number for _, number in device} & calls.keys()
        return {
            "events": len(device) + len(rows("RUNTIME", "start")) + num_ranges,
            "kernels": len(device),
            "kernel us": round(sum(duration for duration, _ in device) / 1e3),
            "launches": len(launching),
            "replays": sum("GraphLaunch" in calls[number] for number in launching),
        }


OURS_OF_SNAPSHOTS = """
import json, sys
from pathlib import Path
from harness.profiling.memory.summary import summarize_memory
devices = summarize_memory(Path(sys.argv[1])).devices
names = ("reserved_bytes", "allocated_bytes", "requested_bytes", "num_segments", "num_events", "peak_bytes")
print("RESULT" + json.dumps({
    **{name: [getattr(device, name) for device in devices] for name in names},
    "contradictions": [line for device in devices for line in device.contradictions]}))
"""


def plain_snapshot(path: Path) -> dict[str, Any]:
    """Add up the blocks of a memory snapshot, and find its peak by walking back from what is in use at its end."""
    snapshot = pickle.loads(path.read_bytes())
    counts: dict[str, list[int]] = {}
    for device, events in enumerate(snapshot["device_traces"]):
        segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
        if not segments and not events:
            continue
        blocks, in_use = [block for segment in segments for block in segment["blocks"]], {}
        for segment in segments:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    in_use[address] = block["size"]
                address += block["size"]
        used = [block for block in blocks if block["state"] == "active_allocated"]
        total = peak = sum(in_use.values())
        for event in reversed(events):
            if event["action"] == "alloc":
                total -= in_use.pop(event["addr"], 0)
            elif event["action"] == "free_completed":
                in_use[event["addr"]] = event["size"]
                total += event["size"]
            peak = max(peak, total)
        for name, number in {
            "reserved_bytes": sum(segment["total_size"] for segment in segments),
            "allocated_bytes": sum(block["size"] for block in used),
            "requested_bytes": sum(block.get("requested_size", block["size"]) for block in used),
            "num_segments": len(segments),
            "num_events": len(events),
            "peak_bytes": peak,
        }.items():
            counts.setdefault(name, []).append(number)
    return counts


def snapshots(paths: Sequence[Path]) -> None:
    """Print what is in snapshots, and whether the plain script agrees."""
    rows = []
    for path in paths:
        seconds, memory, output, _ = timed(sys.executable, OURS_OF_SNAPSHOTS, path)
        ours, expected = json.loads(output.rpartition("RESULT")[2]), plain_snapshot(path)
        differs = [f"{name} {ours[name]} for {value}" for name, value in expected.items() if ours[name] != value]
        figures = [f"{sum(ours[name]) / 2**20:,.1f}" for name in ("reserved_bytes", "allocated_bytes", "peak_bytes")]
        said = ", ".join([*differs, *ours["contradictions"]]) or "equal"
        rows.append([path.stem[-44:], sum(ours["num_events"]), *figures, said, f"{seconds:.1f} s, {memory:,.0f} MB"])
    print(
        tabulate(rows, ["snapshot", "events", "reserved", "in use", "peak MiB", "figures", "ours"], tablefmt="github")
    )


def plain(path: Path) -> dict[str, Any]:
    """Count with loops alone."""
    if path.suffix == ".sqlite":
        return plain_report(path)
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        events = json.load(file)["traceEvents"]
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in complete if event.get("cat") in DEVICE]
    calls: dict[int, list[str]] = {}
    for event in complete:
        category, number = event.get("cat", ""), event.get("args", {}).get("correlation", -1)
        if category.endswith(("_runtime", "_driver", "Runtime")) and number != -1:
            calls.setdefault(number, []).append(event["name"])
    launching = {event.get("args", {}).get("correlation", -1) for event in kernels} & calls.keys()
    return {
        "events": len(events),
        "operators": sum(event.get("cat", "") in ("cpu_op", "Operator", "") for event in complete),
        "kernels": len(kernels),
        "kernel us": round(sum(max(event.get("dur", 0), 0) for event in kernels)),
        "launches": len(launching),
        "replays": sum("GraphLaunch" in "".join(calls[number]) for number in launching),
    }


def timed(python: str, program: str, path: Path) -> tuple[float, float, str, bool]:
    """Return seconds, peak MB and output of a process."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [python, "-c", program, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    return time.perf_counter() - begin, usage.ru_maxrss / 1024, output, status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default=sys.executable)
    parser.add_argument("--plain", action="store_true", help="count one trace with loops, and nothing else")
    parser.add_argument("traces", type=Path, nargs="+")
    options = parser.parse_args()
    if options.plain:
        sys.stdout.write(json.dumps(plain(options.traces[0])))
        return
    if pickles := [path for path in options.traces if path.suffix == ".pickle"]:
        snapshots(pickles)
    rows = []
    for path in options.traces:
        if path in pickles:
            continue
        seconds, memory, output, _ = timed(sys.executable, OURS, path)
        ours = json.loads(output.rpartition("RESULT")[2])
        command = [
            sys.executable,
            __file__,
            "--plain",
            str(path),
        ]  # the peak of a process is at least that of its parent
        expected = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        differs = [
            f"{name} {ours[name]:,} for {value:,}" for name, value in expected.items() if abs(ours[name] - value) > 1
        ]
        peers = [timed(options.peers, program, path) for program in (HTA, TRACELENS)]
        cells = [f"{peer[0]:.1f} s, {peer[1]:,.0f} MB" if peer[3] else "error" for peer in peers]
        share = f"{1 - ours['other us'] / ours['kernel us']:.0%}" if ours["kernel us"] else "-"
        counts = [f"{ours[name]:,}" for name in ("events", "kernels", "launches", "replays")]
        name = str(path.name).removesuffix(".gz").removesuffix(".json")[:44]
        rows.append([name, *counts, share, ", ".join(differs) or "equal", f"{seconds:.1f} s, {memory:,.0f} MB", *cells])
        print(rows[-1], file=sys.stderr, flush=True)
    header = [
        "trace",
        "events",
        "kernels",
        "launches",
        "replays",
        "in a category",
        "counts",
        "ours",
        "HTA",
        "TraceLens",
    ]
    if rows:
        print(tabulate(rows, header, tablefmt="github"))


if __name__ == "__main__":
    main()
