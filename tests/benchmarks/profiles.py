"""Profile the reference engine and HF, a tiny checkpoint and 142M parameters, and hold the figures to each other.

    python tests/benchmarks/profiles.py [--dtype float32] [--device cpu] [--out reports/cpu/profiles.md]

FLOPs and K/V must be those of the formulas, allocations and frees must balance. Exits with 1 if one does not.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tabulate import tabulate

from harness.base.environment import describe_machine
from harness.extensions.bench.shape import build_checkpoint, find_shape

ROOT = Path(__file__).parents[2]
ENGINES = ("reference", "hf")
PASSES = ("trace", "memory", "counters")
WORK = ("--prompt-tokens", "128", "--max-new-tokens", "32", "--batch-size", "4")


def profile(model: Path, engine: str, dtype: str, device: str) -> dict[str, Any]:
    """Run `harness profile` in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-c", "from harness.cli.main import main; main()", "profile", "--model", str(model),
            "--engine", engine, "--dtype", dtype, "--device", device, *WORK, "--out", f"{folder}/out",
            "--format", "json",
        ]  # fmt: skip
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


def row(model: str, document: dict[str, Any], phase: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    kept = phase["num_kept"]
    return [
        model,
        document["engine"],
        phase["name"],
        f"{phase['wall_ms'] / phase['num_steps']:.2f}",
        f"{phase['attributed_share']:.1%}",
        "equal"
        if phase["flops_measured"] == phase["flops_formula"]
        else f"{phase['flops_measured']:,} of {phase['flops_formula']:,}",
        "equal"
        if phase["kv_bytes_measured"] == phase["kv_bytes_formula"]
        else f"{phase['kv_bytes_measured']:,} of {phase['kv_bytes_formula']:,}",
        f"{phase['num_allocations']:,}" + (f", {kept} kept" if kept else ""),
        f"{phase['peak_bytes'] / 2**20:.1f}",
        f"{phase['mfu']:.1%}",
        f"{phase['mbu']:.1%}",
        phase["bound_by"],
    ]


def is_sound(phase: dict[str, Any]) -> bool:
    """Return whether counts and formulas agree and nothing leaks."""
    return bool(
        phase["flops_measured"] == phase["flops_formula"]
        and phase["kv_bytes_measured"] == phase["kv_bytes_formula"]
        and not phase["num_kept"]
    )


def main() -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "cpu" / "profiles.md")
    options = parser.parse_args()
    rows, costs, unsound = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        big = Path(folder)
        build_checkpoint(find_shape("142m"), big, dtype=options.dtype, seed=0, device=options.device)
        for name, model in (("qwen3-tiny", ROOT / "cases" / "checkpoints" / "qwen3-tiny"), ("142m", big)):
            for engine in ENGINES:
                document = profile(model, engine, options.dtype, options.device)
                rows += [row(name, document, phase) for phase in document["phases"]]
                unsound += sum(not is_sound(phase) for phase in document["phases"])
                cost = document["overhead"]
                costs.append([name, engine, *(f"{cost[key]:.2f}" for key in PASSES)])
    header = [
        "model", "engine", "phase", "step ms", "attributed", "FLOPs, counted and formula", "K/V bytes", "allocations",
        "peak MiB", "MFU", "MBU", "bound by",
    ]  # fmt: skip
    machine = describe_machine(options.device)
    text = [
        "# Profiles",
        f"`python tests/benchmarks/profiles.py --dtype {options.dtype} --device {options.device}`, "
        f"{datetime.date.today()}; 4 requests of 128 tokens, 32 new ones each, {options.dtype}.",
        f"{machine.hardware}; {machine.software}.",
        "A step's time is without a profiler. Attributed: share of the trace inside of a named operation. Allocations:"
        " in the captured steps; each was freed again unless it says otherwise.",
        tabulate(rows, header, tablefmt="github", disable_numparse=True),
        "## What profiling costs",
        "Time of the captured steps in each pass, as a multiple of the plain run.",
        tabulate(costs, ["model", "engine", *PASSES], tablefmt="github", disable_numparse=True),
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n\n".join(text) + "\n", encoding="utf-8")
    return 1 if unsound else 0


if __name__ == "__main__":
    sys.exit(main())
