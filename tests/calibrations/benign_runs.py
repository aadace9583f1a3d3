"""Benign variants under many instruction sets and thread counts: none of these runs may alarm.

    python -m tests.calibrations.benign_runs --out runs.jsonl --keep alarms/ [--passes 20] [--first 0]

A pass checks every benign variant of the scoreboard once, in a separate process, since the libraries read their
instruction sets when they are loaded. Passes go through three instruction sets and one to four threads in turn; three
passes share their prompts, and through the cache their goldens, which then come from other instructions than the
engine.
Each run adds a line to `--out`: configuration, variant, seed, seconds, alarm. The recordings of an alarm stay in
`--keep`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from harness.base.files import scratch_folder
from harness.errors import HarnessError
from harness.extensions.faults.fault import Variant
from harness.extensions.faults.reference.variants import variants
from harness.extensions.faults.subject import opened
from harness.judge.jobs.check import run_check
from harness.results.check import Outcome

INSTRUCTIONS = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "none": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
MAX_THREADS = 4


def main() -> None:
    """Run the passes, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first pass")
    parser.add_argument("--only", type=int, help="run this pass, in this process")
    arguments = parser.parse_args()
    if arguments.only is not None:
        run_pass(arguments.only, arguments.out, arguments.keep)
        return
    for number in range(arguments.first, arguments.first + arguments.passes):
        instructions, threads, _ = configuration(number)
        environment = {**os.environ, **INSTRUCTIONS[instructions], "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--out", arguments.out, "--keep", arguments.keep, "--only", str(number)]
        subprocess.run(command, env={**environment, "OMP_WAIT_POLICY": "passive"}, check=True)
    print(summary(arguments.out))


def configuration(number: int) -> tuple[str, int, int]:
    """Return the instruction set, the threads and the seed of a pass."""
    names = list(INSTRUCTIONS)
    group = number // len(names)
    return names[number % len(names)], group % MAX_THREADS + 1, 100 + group


def run_pass(number: int, out: Path, keep: Path) -> None:
    """Check every variant once, and write a line for each."""
    instructions, threads, seed = configuration(number)
    with out.open("a", encoding="utf-8") as file:
        for variant in variants():
            begin, begin_cpu = time.perf_counter(), time.process_time()
            alarm = alarm_of(variant, seed, keep / f"pass-{number}" / variant.id.replace("/", "-"))
            line = {
                "pass": number, "instructions": instructions, "threads": threads, "seed": seed, "variant": variant.id,
                "seconds": round(time.perf_counter() - begin, 3), "load": os.getloadavg()[0],
                "cpu_seconds": round(time.process_time() - begin_cpu, 3), "alarm": alarm,
            }  # fmt: skip
            print(json.dumps(line), file=file, flush=True)


def alarm_of(variant: Variant, seed: int, keep: Path) -> str | None:
    """Check a variant; return what was alarming, with its recordings in `keep`."""
    with scratch_folder("harness-") as name:
        folder = name / "runs"
        try:
            with opened(variant, seed=seed) as (subject, _):
                result = run_check(subject.plan, out=folder)
        except HarnessError as error:
            alarm = str(error)
        else:
            if result.outcome is Outcome.PASS:
                return None
            alarm = "; ".join(finding.message for run in result.runs for finding in run.findings)
        keep.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            folder.rename(keep)
        return alarm


def summary(out: Path) -> str:
    """Return the runs and alarms of each configuration as a table."""
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    places = [(line["instructions"], line["threads"]) for line in lines]
    alarms = Counter(place for place, line in zip(places, lines, strict=True) if line["alarm"] is not None)
    rows = [f"| {name} | {threads} | {n} | {alarms[name, threads]} |" for (name, threads), n in Counter(places).items()]
    return "\n".join(["| instructions | threads | runs | alarms |", "|---|---|---|---|", *sorted(rows)])


if __name__ == "__main__":
    main()
