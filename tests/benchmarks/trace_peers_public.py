"""What HolisticTraceAnalysis and TraceLens say of traces that real GPUs have made, beside what we say.

    python tests/benchmarks/trace_peers_public.py --peers PYTHON TRACE...

PYTHON is an interpreter of an environment with HolisticTraceAnalysis (and pandas below 3, which it needs) and
TraceLens. The traces lie in the repositories of both projects, in `tests/data` and `tests/traces`. Prints a table.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from tabulate import tabulate

from harness.profiling.trace.critical_path import critical_path
from harness.profiling.trace.file import read_trace
from harness.profiling.trace.summary import summarize
from harness.results.trace import LinkKind

PEERS = """
import gzip, json, logging, sys, tempfile, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
file, step = sys.argv[1:3]
found = {}
try:
    from TraceLens import TreePerfAnalyzer
    analyzer = TreePerfAnalyzer.from_file(file)
    timeline = analyzer.get_df_gpu_timeline().set_index("type")["time ms"]
    launchers = analyzer.get_df_kernel_launchers().groupby("name").total_direct_kernel_time.sum()
    products = sum(float(launchers.get(name, 0)) for name in ("aten::mm", "aten::addmm", "aten::bmm"))
    found["TraceLens"] = {"span": 1e3 * timeline["total_time"], "busy": 1e3 * timeline["busy_time"],
                          "comm": 1e3 * timeline["total_comm_time"], "products": products}
except Exception as error:
    found["TraceLens"] = {"error": repr(error)[:200]}
try:
    from hta.trace_analysis import TraceAnalysis
    folder = tempfile.mkdtemp()
    document = json.load(gzip.open(file))
    document.setdefault("distributedInfo", {})["rank"] = 0
    json.dump(document, gzip.open(folder + "/rank0.json.gz", "wt"))
    analysis = TraceAnalysis(trace_dir=folder)
    own = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    found["HTA"] = {"span": float(own["kernel_time(us)"]),
                    "busy": float(own["kernel_time(us)"] - own["idle_time(us)"])}
    if step:
        graph, _ = analysis.critical_path_analysis(rank=0, annotation=step, instance_id=int(sys.argv[3]))
        path = graph.get_critical_path_breakdown()
        kind = path["type"].astype(str)
        of = lambda word: float(path.duration[kind.str.contains(word)].sum())
        is_gpu = path.stream >= 0
        found["HTA"]["path"] = {
            "kernel and copy": float(path.duration[kind.str.contains("operator") & is_gpu].sum()),
            "launch": of("launch_delay"), "queue": of("kernel_kernel"),
            "cpu": float(path.duration[kind.str.contains("operator") & ~is_gpu].sum())}
except Exception as error:
    found.setdefault("HTA", {})["error"] = repr(error)[:200]
print("RESULT" + json.dumps(found))
"""


def peer_figures(python: str, trace: Path, step: str, instance: int) -> tuple[dict, float]:
    begin = time.perf_counter()
    command = [python, "-c", PEERS, str(trace), step, str(instance)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((line for line in ran.stdout.splitlines() if line.startswith("RESULT")), None)
    if line is None:
        raise SystemExit(f"the peers failed:\n{ran.stderr[-3000:]}")
    return json.loads(line.removeprefix("RESULT")), time.perf_counter() - begin


def our_figures(trace: Path) -> dict[str, float]:
    summary = summarize(trace)
    (device,) = summary.devices[:1]
    products = [rate for rate in summary.rates if rate.name in ("aten::mm", "aten::addmm", "aten::bmm")]
    communication = device.communication
    return {
        "span": device.span_us,
        "busy": device.busy_us,
        "comm": communication.total_us if communication else 0.0,
        "products": sum(product.time_us for product in products),
        "unlinked kernels": device.launches.num_unknown,
    }


def our_path(trace: Path, step: str, instance: int) -> dict[str, float]:
    path = critical_path(read_trace(trace), str(trace), within=re.compile(re.escape(step)), instance=instance)
    sums = {
        "kernel and copy": (LinkKind.KERNEL, LinkKind.COPY, LinkKind.COMMUNICATION),
        "launch": (LinkKind.LAUNCH,),
        "queue": (LinkKind.QUEUE, LinkKind.OTHER_STREAM),
        "cpu": (LinkKind.OPERATOR, LinkKind.RUNTIME),
        "between operators": (LinkKind.HOST, LinkKind.UNKNOWN),
    }
    return {name: sum(path.time_us(kind) for kind in kinds) for name, kinds in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--step", default="", help="annotation of the step whose critical path is compared")
    parser.add_argument("--instance", type=int, default=0)
    parser.add_argument("traces", type=Path, nargs="+")
    options = parser.parse_args()
    rows = []
    for trace in options.traces:
        peers, seconds = peer_figures(options.peers, trace, options.step, options.instance)
        begin = time.perf_counter()
        ours = our_figures(trace)
        own_seconds = time.perf_counter() - begin
        label = f"{trace.parent.name}/{trace.name.removesuffix('.json.gz')[:36]}"
        for figure, value in ours.items():
            rows.append([label, f"{figure}, us" if "kernels" not in figure else figure, value,
                         *(peers[peer].get(figure) for peer in ("HTA", "TraceLens"))])  # fmt: skip
        if options.step:
            theirs = peers["HTA"].get("path", {})
            for kind, value in our_path(trace, options.step, options.instance).items():
                rows.append([label, f"critical path, {kind}, us", value, theirs.get(kind), None])
        errors = {peer: figures["error"] for peer, figures in peers.items() if "error" in figures}
        print(f"{label}: ours {own_seconds:.1f} s, both peers {seconds:.1f} s {errors or ''}", file=sys.stderr)
    header = ["trace", "figure", "ours", "HolisticTraceAnalysis", "TraceLens"]
    print(tabulate(rows, header, tablefmt="github", floatfmt=",.3f"))


if __name__ == "__main__":
    main()
