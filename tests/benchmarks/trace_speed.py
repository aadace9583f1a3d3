"""Time and memory of `harness trace summary` on a large trace, beside json + pandas and HolisticTraceAnalysis.

    python tests/benchmarks/trace_speed.py [--megabytes 210] [--repeats 3] [--peers PYTHON] [--out FILE]

The trace is a real one of the reference engine's decode steps, repeated and moved in time until the file is large
enough. Each reader is a separate process, in turn. `--peers` is a Python with pandas and HolisticTraceAnalysis;
without it ours is timed alone.
"""

import argparse
import datetime
import gzip
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tabulate import tabulate

from harness.base.environment import describe_machine

ROOT = Path(__file__).parents[2]
PANDAS = """
import json, sys
import pandas
with open(sys.argv[1]) as file:
    events = json.load(file)["traceEvents"]
frame = pandas.DataFrame([event for event in events if event["ph"] == "X"])
print(frame[frame.cat == "cpu_op"].groupby("name").dur.agg(["count", "sum"]).sort_values("sum").tail(5))
"""
HTA = """
import sys
from hta.common.trace import Trace
trace = Trace(trace_files={0: sys.argv[1]}, trace_dir="")
trace.parse_traces(use_multiprocessing=False)
frame = trace.get_trace(0)
print(frame.groupby("name").dur.agg(["count", "sum"]).sort_values("sum").tail(5))
"""
WATCHER = """
import resource, subprocess, sys, time
begin = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
OURS = "from harness.cli.main import main; main()"


def record(folder: Path) -> Path:
    """Profile the embedded model and return its decode trace."""
    command = [sys.executable, "-c", OURS, "profile", "--phase", "decode", "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next((folder / "trace").glob("*decode*"))


def multiply(source: Path, target: Path, num_bytes: int) -> int:
    """Write the events of a trace again and again, each time later, and return how many there are."""
    document: dict[str, Any] = json.loads(gzip.decompress(source.read_bytes()))
    events = [event for event in document["traceEvents"] if event["ph"] == "X" and event["cat"] != "Trace"]
    begin = min(event["ts"] for event in events)
    span = max(event["ts"] + event["dur"] for event in events) - begin + 100
    num_events = 0
    with target.open("w", encoding="utf-8") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [\n')
        while file.tell() < num_bytes:
            offset = span * (num_events // len(events)) - begin
            moved = (event | {"ts": round(event["ts"] + offset, 3)} for event in events)
            # Indented, as torch writes them.
            text = ",\n".join(json.dumps(event, indent=2) for event in moved)
            file.write(",\n" * bool(num_events) + text)
            num_events += len(events)
        file.write("\n]}\n")
    return num_events


def run(command: list[str]) -> tuple[float, float]:
    """Return seconds and the largest resident set in MB of a process.

    A small process starts it: until its `exec` a child is as large as what it was forked from.
    """
    watched = [sys.executable, "-S", "-c", WATCHER, *command]
    printed = subprocess.run(watched, check=True, capture_output=True, text=True).stdout
    seconds, kibibytes = map(float, printed.split())
    return seconds, kibibytes * 1024 / 1e6


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=210)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", help="a Python with pandas and HolisticTraceAnalysis")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "cpu" / "trace.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "large.json"
        num_events = multiply(record(Path(folder) / "profile"), trace, options.megabytes * 10**6)
        packed = Path(folder) / "large.json.gz"
        with trace.open("rb") as plain, gzip.open(packed, "wb", compresslevel=6) as file:
            shutil.copyfileobj(plain, file)
        readers = {
            "harness trace summary": [sys.executable, "-c", OURS, "trace", "summary", str(trace)],
            "the same, gzipped": [sys.executable, "-c", OURS, "trace", "summary", str(packed)],
        }
        if options.peers:
            readers["json + pandas"] = [options.peers, "-c", PANDAS, str(trace)]
            readers["HolisticTraceAnalysis"] = [options.peers, "-c", HTA, str(trace)]
        runs_by_reader: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
        for _ in range(options.repeats):
            for name, command in readers.items():
                runs_by_reader[name].append(run(command))
        size = f"{trace.stat().st_size / 1e6:,.0f} MB plain, {packed.stat().st_size / 1e6:,.0f} MB gzipped"
    options.out.write_text(report(runs_by_reader, num_events, size, options.repeats, options.peers), encoding="utf-8")


def report(
    runs_by_reader: dict[str, list[tuple[float, float]]], num_events: int, size: str, repeats: int, peers: str
) -> str:
    """Return the report."""
    ours = [seconds for seconds, _ in runs_by_reader["harness trace summary"]]
    rows = []
    for name, runs in runs_by_reader.items():
        seconds, megabytes = zip(*runs, strict=True)
        ratios = [duration / base for duration, base in zip(seconds, ours, strict=True)]
        rows.append([
            name, f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
            f"{max(megabytes):,.0f}", f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})",
        ])  # fmt: skip
    machine = describe_machine("cpu")
    versions = {"python": platform.python_version()} | (_versions(peers) if peers else {})
    return "\n\n".join([
        "# Reading large traces",
        f"`python tests/benchmarks/trace_speed.py --repeats {repeats}{' --peers PYTHON' * bool(peers)}`, "
        f"{datetime.date.today()}. {machine.device}, {' '.join(machine.cpu_flags)}; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}.",
        f"{num_events:,} events, {size}. Each reader in a separate process, start included, in turn; median, least "
        "and most. The ratio is to ours of the same repeat.",
        tabulate(rows, ["reader", "seconds", "peak MB", "times ours"], tablefmt="github", disable_numparse=True),
        "Each sums up its operators: the peers by total time, ours by phase and with self time too.",
    ]) + "\n"  # fmt: skip


def _versions(python: str) -> dict[str, str]:
    names = ("pandas", "HolisticTraceAnalysis")
    script = f"import importlib.metadata as m; print(*[m.version(n) for n in {names}])"
    printed = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout
    return dict(zip(names, printed.split(), strict=True))


if __name__ == "__main__":
    main()
