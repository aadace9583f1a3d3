"""How soon `harness fuzz run` finds the faults of the catalogue, and how small the workloads are that it reports.

    python -m tests.calibrations.fuzz_faults [--category cache] [--seconds 60] > reports/cpu/fuzz.md

Each fault is searched from a cold start: a separate process, with an empty cache of goldens. Seconds are those a user
waits: from the start of the process, imports included, until the first workload failed.
"""

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time

import torch
import transformers
from tabulate import tabulate

from harness.base.files import scratch_folder
from harness.extensions.faults.catalogue import FAULTS, choose
from harness.extensions.faults.fault import EngineKind

REFERENCE = [EngineKind.REFERENCE]
HEADERS = (
    "fault", "seed", "found", "seconds", "CPU s", "workloads", "shrunk (s)", "requests", "rows", "limits",
    "operation", "named",
)  # fmt: skip

EXPLANATION = """Each fault is searched from a cold start. `seconds`: from the start of the process, imports and golden
included, until a workload failed; `CPU s`: that part of the process's CPU time, in proportion; `workloads`: judged
until then, each from beginning to end; then what shrinking made of it. `named`: the cause is the catalogue's; `raised`:
the engine itself ended, which is the finding.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    chosen = choose(arguments.only or None, arguments.category or ([] if arguments.only else ["cache"]), REFERENCE)
    rows = []
    for fault in chosen:
        for seed in range(arguments.seeds):
            rows.append(searched(fault.id, seed, arguments.seconds))
            print(rows[-1], file=sys.stderr, flush=True)
    threads = os.environ.get("OMP_NUM_THREADS", "as many")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print("# Searched schedules: how soon known bugs are found\n")
    print(f"`python {' '.join(sys.argv)}`, {time.strftime('%Y-%m-%d')}.")
    print(f"{platform.machine()}, {os.cpu_count()} cores, {versions}, one process of {threads} thread(s).\n")
    print(EXPLANATION)
    print(tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True))


def searched(fault: str, seed: int, seconds: int) -> list[object]:
    command = [
        sys.executable, "-c", "from harness.cli import main; main()",
        "fuzz", "run", "--fault", fault, "--first", "--seconds", str(seconds), "--seed", str(seed), "--format", "json",
    ]  # fmt: skip
    with scratch_folder("harness-") as cache:
        begin, cpu_begin = time.perf_counter(), _cpu_of_children()
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env={**os.environ, "HARNESS_CACHE": str(cache)}
        )
        wall, cpu = time.perf_counter() - begin, _cpu_of_children() - cpu_begin
    result = json.loads(done.stdout)
    if not result["findings"]:
        return [fault, seed, "no", "-", f"{cpu:.0f}", result["num_workloads"], "-", "-", "-", "-", "-", "-"]
    (finding,) = result["findings"]
    before = wall - result["timings_s"]["all"]
    elapsed = before + finding["found_s"]
    requests = finding["workload"]["requests"]
    limits = ", ".join(f"{name}={value}" for name, value in finding["workload"]["limits"].items())
    return [
        fault, seed, "yes", f"{elapsed:.0f}", f"{cpu * elapsed / wall:.0f}", result["num_workloads"],
        f"{finding['shrunk_s']:.0f}", len(requests), sum(len(request["token_ids"]) for request in requests),
        limits or "-", finding["signature"][:60], named(fault, finding),
    ]  # fmt: skip


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def named(fault: str, finding: dict[str, object]) -> str:
    first = finding["first_divergence"]
    if not isinstance(first, dict):
        return "raised"
    explanation = first["explanation"] or {}
    words = " ".join(str(explanation.get(key, "")) for key in ("cause", "scope", "detail", "provenance"))
    return "yes" if re.search(FAULTS[fault].cause, words) else "no"


if __name__ == "__main__":
    main()
