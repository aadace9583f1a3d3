"""Measure the local error of sound engines per kind of operation and dtype, and what share of its bound it takes.

The bounds of `harness.judge.compare.bounds` were chosen from this table. Writes reports/<kind>/noise-floors.md.

    python -m tests.calibrations.noise_floors [--stories FOLDER] [--device cpu] [--out FILE]
"""

import argparse
import platform
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from harness.base.environment import environment
from harness.base.files import scratch_folder
from harness.formats.case import RequestSpec, load_case
from harness.formats.recording import Recording
from harness.judge.compare import Requirements, compare_run
from harness.judge.compare.run import Comparison
from harness.judge.jobs.opened import open_planned, record_run
from harness.oracle.make_golden import cached_golden
from harness.oracle.model import HFModel, load_model
from harness.plan import Plan, plan_request

ROOT = Path(__file__).parents[2]
ENGINES = {"hf eager": ("hf", {"attention": "eager"}), "hf sdpa": ("hf", {}), "reference": ("reference", {})}
SCHEDULES = ("plain", "chunked", "batched")
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the sun with her friends. "


@dataclass(slots=True)
class Floor:
    """Local errors and bounds of one kind of operation under one engine and dtype."""

    roundings: list[torch.Tensor] = field(default_factory=list)
    shares: list[torch.Tensor] = field(default_factory=list)
    conventions: set[str] = field(default_factory=set)

    def add(self, roundings: torch.Tensor, shares: torch.Tensor, convention: str | None) -> None:
        """Add some rows."""
        self.roundings.append(roundings)
        self.shares.append(shares)
        self.conventions |= {convention} if convention else set()

    def cells(self) -> list[str]:
        """Return the columns of the table."""
        errors, shares = torch.cat(self.roundings), torch.cat(self.shares)
        ordered = errors.sort().values
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        figures = [f"{float(x):.3g}" for x in (errors.median(), p99, errors.max(), shares.max())]
        return [f"{len(errors):,}", *figures, ", ".join(sorted(self.conventions)) or "-"]


def plans(stories: Path | None, dtype: str, device: str) -> Iterator[tuple[str, Plan]]:
    """Yield the models to measure, each with its requests."""
    common: dict[str, Any] = {"engine": "reference", "dtype": dtype, "device": device, "local_files_only": True}
    for family in ("llama", "qwen2", "qwen3"):
        case = load_case(ROOT / "cases" / f"{family}-float32.toml")
        yield (
            f"{family}-tiny",
            plan_request(model=case.model, requests=case.requests, max_new_tokens=48, schedules=SCHEDULES, **common),
        )
    if stories is not None:
        requests = [RequestSpec(prompt=STORY * 4), RequestSpec(prompt=STORY), RequestSpec(prompt="Once upon a time")]
        yield (
            "stories260k",
            plan_request(model=str(stories), requests=requests, max_new_tokens=64, schedules=SCHEDULES, **common),
        )


def measure(plan: Plan, floors: dict[tuple[str, str, str], Floor], alarms: list[str]) -> int:
    """Run every engine under every schedule; collect the local errors by kind, and any alarm. Return the runs."""
    hf = load_model(plan.folder, dtype=getattr(torch, plan.case.dtype), device=plan.case.device)
    golden, num_runs = cached_golden(hf, plan.prompts), 0
    for label, (name, options) in ENGINES.items():
        engine_plan = plan.changed(engine=name, engine_options=options)
        with open_planned(engine_plan) as engine:
            for schedule in plan.schedules:
                with scratch_folder("harness-") as folder:
                    record_run(engine_plan, engine, schedule, golden.requests, folder / "run")
                    with Recording.open(folder / "run", verify=False) as recording:
                        comparison = compare_run(
                            recording,
                            golden,
                            hf=hf,
                            requirements=Requirements(
                                wanted=engine.capabilities.wanted(hf.graph), require=schedule.requires
                            ),
                        )
                collect(comparison, plan.case.dtype, hf, floors, label)
                result = comparison.result
                ratio = max(tap.propagated_ratio_max or 0 for tap in result.taps)
                floors[plan.case.dtype, label, "(propagated ratio)"].add(
                    torch.tensor([ratio]), torch.tensor([torch.nan]), None
                )
                alarms += [
                    f"{plan.case.model} {plan.case.dtype} {label} {schedule}: {x.message}" for x in result.findings
                ]
                num_runs += 1
    return num_runs


def collect(
    comparison: Comparison, dtype: str, hf: HFModel, floors: dict[tuple[str, str, str], Floor], label: str
) -> None:
    """Add the local errors of a recording to the floors of its engine, and what HF's own modules made of its inputs."""
    for tap, errors in comparison.errors.items():
        shares = torch.where(errors.roundings == 0, 0.0, errors.roundings / errors.bound)
        kind = hf.graph[tap].kind.value
        floors[dtype, label, kind].add(errors.roundings, shares, errors.convention)
        if errors.control is not None:
            share = torch.where(errors.control == 0, 0.0, errors.control / errors.bound)
            floors[dtype, "(control)", kind].add(errors.control, share, None)


def machine() -> str:
    """Return what the figures depend on."""
    flags = [
        name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in Path("/proc/cpuinfo").read_text()
    ]
    facts = ", ".join(f"{name} {value}" for name, value in environment().items() if value != "")
    return f"{platform.processor() or platform.machine()} ({' '.join(flags)}); {facts}"


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stories", type=Path, default=ROOT.parent / "shared" / "models" / "stories260k")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "cpu" / "noise-floors.md")
    arguments = parser.parse_args()
    stories = arguments.stories if arguments.stories.exists() else None
    floors: dict[tuple[str, str, str], Floor] = defaultdict(Floor)
    alarms: list[str] = []
    num_runs, models = 0, []
    for dtype in ("float32", "bfloat16", "float16"):
        for name, plan in plans(stories, dtype, arguments.device):
            models.append(name)
            num_runs += measure(plan, floors, alarms)
            print(f"{dtype} {name}: {len(alarms)} alarms so far", flush=True)
    rows = [[*key, *floor.cells()] for key, floor in floors.items()]
    headers = ["dtype", "engine", "operation", "rows", "median", "99 %", "max", "largest share of bound", "convention"]
    table = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    date = subprocess.run(["date", "-I"], capture_output=True, text=True, check=True).stdout.strip()
    head = (
        f"# Noise floors\n\n`python -m tests.calibrations.noise_floors`, {date}. {machine()}.\n\n"
        f"Models: {', '.join(dict.fromkeys(models))}; schedules {', '.join(SCHEDULES)}; {num_runs} runs, "
        f"{len(alarms)} alarms.\n\nLocal error of each row in roundings to the dtype, over all layers.\n\n"
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(head + table + "\n" + "".join(f"\n- {alarm}" for alarm in alarms))


if __name__ == "__main__":
    main()
