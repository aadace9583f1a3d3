"""What HolisticTraceAnalysis says of the traces of a GPU that were built by hand, beside what we say.

    python tests/benchmarks/trace_peers.py --peers PYTHON

PYTHON is an interpreter of an environment with HolisticTraceAnalysis. Prints a table; exits with 1 where a figure of
both differs by more than a nanosecond's rounding.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate

from harness.profiling.trace.summary import summarize

HTA = """
import json, sys, logging
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
idle, _ = analysis.get_idle_time_breakdown(ranks=[0, 1], visualize=False)
overlap = analysis.get_comm_comp_overlap(visualize=False)
temporal = analysis.get_temporal_breakdown(visualize=False)
found = {
    "idle": json.loads(idle.to_json(orient="records")),
    "overlap": json.loads(overlap.to_json(orient="records")),
    "temporal": json.loads(temporal.to_json(orient="records")),
}
print("RESULT" + json.dumps(found))
"""


def built_by_hand():
    path = Path(__file__).parents[1] / "unit" / "profiling" / "cuda_trace.py"
    spec = importlib.util.spec_from_file_location("cuda_trace", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peer_figures(python: str, folder: Path) -> dict:
    ran = subprocess.run([python, "-c", HTA, str(folder)], capture_output=True, text=True, check=False)
    line = next((line for line in ran.stdout.splitlines() if line.startswith("RESULT")), None)
    if line is None:
        raise SystemExit(f"HolisticTraceAnalysis failed:\n{ran.stdout[-1000:]}{ran.stderr[-3000:]}")
    return json.loads(line.removeprefix("RESULT"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", required=True)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        paths = built_by_hand().write_ranks(Path(name))
        peer = peer_figures(options.peers, Path(name))
        if "--raw" in sys.argv:
            print(json.dumps(peer, indent=1))
        for rank, path in enumerate(paths):
            (ours,) = summarize(path).devices
            theirs = {
                row["idle_category"]: row["idle_time"]
                for row in peer["idle"]
                if row["rank"] == rank and row["stream"] == 7
            }
            for label, category, value in (
                ("host late", "host_wait", ours.idle[0].host_late_us),
                ("queued", "kernel_wait", ours.idle[0].queued_us),
                ("other", "other", ours.idle[0].other_us),
            ):
                rows.append([rank, f"idle, {label}, us", value, theirs.get(category)])
            overlap = next(row for row in peer["overlap"] if row["rank"] == rank)["comp_comm_overlap_pctg"]
            rows.append([rank, "communication hidden, %", 100 * ours.communication.hidden_share, overlap])
            temporal = next(row for row in peer["temporal"] if row["rank"] == rank)
            rows.append([rank, "kernel span, us", ours.span_us, temporal["kernel_time(us)"]])
            rows.append([rank, "idle device, us", ours.span_us - ours.busy_us, temporal["idle_time(us)"]])
    print(tabulate(rows, ["rank", "figure", "ours", "HolisticTraceAnalysis"], tablefmt="github", floatfmt=".3f"))
    return int(any(theirs is None or abs(ours - theirs) > 0.01 for _, _, ours, theirs in rows))


if __name__ == "__main__":
    sys.exit(main())
