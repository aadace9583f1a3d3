"""Check HF itself, sound and with faults in it, on every architecture of the zoo, and print what came of it.

python -m tests.families.check [--dtypes float32,bfloat16,float16] [--no-faults] [--rows N] [ARCHITECTURE ...]

The engine is HF, prefill and decode through its own cache; the oracle is HF's forward. No line of the harness knows any
of the architectures.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from tabulate import tabulate

from harness.base.environment import environment
from harness.engines.hf import HFEngine
from harness.errors import HarnessError
from harness.extensions.faults.placed import PlacedFault, applicable
from harness.extensions.faults.zoo.models import build, save, tokens
from harness.extensions.faults.zoo.quiet import quiet
from harness.formats.case import RequestSpec
from harness.formats.recording import Recording
from harness.judge.compare import compare_run
from harness.judge.compare.bounds import CONTROL_FACTOR
from harness.judge.jobs.check import planned_sample
from harness.judge.jobs.opened import record_run
from harness.oracle.golden import Golden
from harness.oracle.make_golden import make_golden
from harness.oracle.model import HFModel, load_model
from harness.plan import Plan, plan_request
from harness.results.check import Divergence, Outcome, RunResult

from .architectures import architectures, excluded

PROMPT_LENGTHS = (40, 17)
NUM_NEW = 6
DTYPES = ("float32", "bfloat16", "float16")
FAULT_DTYPE = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One architecture in one dtype."""

    run: RunResult | None
    error: str = ""
    seconds: float = 0.0

    @property
    def word(self) -> str:
        """`pass`, or what was found first."""
        if self.run is None:
            return self.error
        if self.run.outcome is Outcome.PASS:
            return "pass"
        return self.run.findings[0].message if self.run.findings else str(self.run.outcome)

    @property
    def share(self) -> float:
        """Largest share of a bound."""
        taps = () if self.run is None else self.run.taps
        return max((tap.local_bound_share_max or 0.0 for tap in taps), default=0.0)


class Subject:
    """One architecture in one dtype: its golden, and HF as the engine."""

    def __init__(self, name: str, dtype: str, folder: Path, rows: int | None = None) -> None:
        self._folder = folder / "golden"
        self.plan = plan_request(
            model=str(folder / name),
            engine="hf",
            dtype=dtype,
            device="cpu",
            requests=[
                RequestSpec(token_ids=tokens(seed=at, count=n)[0].tolist()) for at, n in enumerate(PROMPT_LENGTHS)
            ],
            max_new_tokens=NUM_NEW,
            schedules=["plain"],
            rows=rows,
            local_files_only=True,
        )
        self.oracle = self._load()
        self.golden: Golden = make_golden(self.oracle, self.plan.prompts, self._folder)

    def _load(self) -> HFModel:
        return load_model(self.plan.folder, dtype=getattr(torch, self.plan.case.dtype), stays=True)

    def check(self, fault: PlacedFault | None = None) -> RunResult:
        """Run the engine, with a fault in its copy of the model if one is given, and compare."""
        engine = HFEngine(self._load(), None)
        if fault is not None:
            fault.inject(engine._hf.model)
        return recorded_and_compared(self.plan, engine, self.golden, self.oracle)


def recorded_and_compared(plan: Plan, engine: HFEngine, golden: Golden, oracle: HFModel) -> RunResult:
    """Record the engine and compare it with the golden."""
    with tempfile.TemporaryDirectory() as folder:
        record_run(plan, engine, plan.schedules[0], golden.requests, Path(folder) / "run")
        with Recording.open(Path(folder) / "run", verify=False) as actual:
            return compare_run(actual, golden, hf=oracle, sample=planned_sample(plan)).result


@contextmanager
def subject(name: str, dtype: str, rows: int | None = None) -> Iterator[Subject]:
    """Build an architecture, write it, and open it as a subject."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        save(name, Path(folder) / name)
        yield Subject(name, dtype, Path(folder), rows)


def checked(name: str, dtype: str, rows: int | None = None) -> Checked:
    """Check HF on an architecture in a dtype; what it raises is a result."""
    begin = time.perf_counter()
    try:
        with subject(name, dtype, rows) as opened:
            return Checked(run=opened.check(), seconds=time.perf_counter() - begin)
    except Exception as error:
        text = error.what if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"
        return Checked(run=None, error=" ".join(text.split())[:160], seconds=time.perf_counter() - begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fault in one architecture."""

    fault: PlacedFault
    divergence: Divergence | None
    is_found: bool
    """Whether the first divergence is at a module that may be blamed."""


def tried(name: str, rows: int | None = None) -> list[Trial]:
    """Plant every fault that applies to an architecture, one at a time, and say where each was found."""
    faults = applicable(build(name))
    with subject(name, FAULT_DTYPE, rows) as opened:
        trials = []
        for fault in faults:
            first = opened.check(fault).first_divergence
            is_found = first is not None and may_be_blamed(opened.oracle, first.tap, fault)
            trials.append(Trial(fault=fault, divergence=first, is_found=is_found))
    return trials


def may_be_blamed(hf: HFModel, tap: str, fault: PlacedFault) -> bool:
    """Whether a tap is computed by one of the modules that may be blamed for a fault."""
    if tap not in hf.graph:
        return False
    operation = hf.graph[tap]
    between = operation.source.endswith(":input")  # computed by a module that holds the one that reads it
    return any(
        operation.module == site
        or hf.graph.canonical(site) == tap
        or (between and operation.module.startswith(f"{site}." if site else ""))
        or (not site and operation.layer is None)
        for site in fault.sites
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.families.check")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--rows", type=int, help="judge products and attention in a sample of so many rows")
    options = parser.parse_args()
    torch.set_num_threads(1)  # small tensors: a second thread costs more than it brings
    dtypes = options.dtypes.split(",")
    names = options.names or architectures()
    results = {}
    for name in names:
        results[name] = {dtype: checked(name, dtype, options.rows) for dtype in dtypes}
        sys.stderr.write(f"{name}: {'; '.join(f'{d} {item.word}' for d, item in results[name].items())}\n")
    trials = {}
    for name in () if options.no_faults else names:
        if any(item.word == "pass" for item in results[name].values()):
            trials[name] = tried(name, options.rows)
            missed = [item for item in trials[name] if not item.is_found]
            for item in missed:
                where = item.divergence.tap if item.divergence else "nowhere"
                sys.stderr.write(f"{name}: {item.fault.name} found at {where}, not at {', '.join(item.fault.sites)}\n")
    parts = [heading(), summary(results, trials), sound_table(results), fault_table(trials)]
    sys.stdout.write("\n\n".join(parts) + "\n")
    if not options.names:
        rows = list(excluded().items())
        sys.stdout.write("\n" + tabulate(rows, ["not a decoder-only text model", "why"], tablefmt="github") + "\n")


def heading() -> str:
    """Say what this is, and what made it."""
    made_with = ", ".join(f"{name} {value}" for name, value in environment().items() if value)
    return (
        "# Families\n\n"
        f"`python -m tests.families.check`, {date.today()}: {made_with}.\n\n"
        "Every decoder-only text architecture of transformers' causal language models, with tiny random weights under\n"
        "which it behaves as a trained one. HF itself is the engine: prefill, then decode through its own cache.\n"
        f"Faults are planted in the engine's copy, in {FAULT_DTYPE}."
    )


def sound_table(results: dict[str, dict[str, Checked]]) -> str:
    """Return one line an architecture: what each dtype came to."""
    rows = []
    for name, by_dtype in results.items():
        runs = [item.run for item in by_dtype.values() if item.run is not None]
        taps = max((len(run.taps) for run in runs), default=0)
        num_rows = sum(run.num_rows for run in runs)
        shares = [f"{item.share:.2f}" if item.word == "pass" else "-" for item in by_dtype.values()]
        worst = next((f"{dtype}: {item.word}" for dtype, item in by_dtype.items() if item.word != "pass"), "")
        rows.append([name, taps, num_rows, *shares, worst])
    dtypes = list(next(iter(results.values()), {}))
    headers = ["architecture", "taps", "rows", *(f"{dtype}: largest share of bound" for dtype in dtypes), "not passed"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def fault_table(trials: dict[str, list[Trial]]) -> str:
    """Return one line a fault: in how many architectures it was planted, and found where it is."""
    planted: dict[str, list[Trial]] = {}
    for item in (trial for of_architecture in trials.values() for trial in of_architecture):
        planted.setdefault(item.fault.name, []).append(item)
    rows = [
        [name, len(same_fault), sum(trial.is_found for trial in same_fault)]
        for name, same_fault in sorted(planted.items())
    ]
    return tabulate(rows, ["fault", "architectures", "found at the right tap"], tablefmt="github")


def summary(results: dict[str, dict[str, Checked]], trials: dict[str, list[Trial]]) -> str:
    """Return the totals in words."""
    passed = [name for name, by_dtype in results.items() if all(item.word == "pass" for item in by_dtype.values())]
    planted = [trial for of_architecture in trials.values() for trial in of_architecture]
    num_found = sum(trial.is_found for trial in planted)
    enough = sum(len(item) >= 3 for item in trials.values())
    text = f"{len(passed)} of {len(results)} architectures pass in every dtype."
    if planted:
        text += f" {num_found} of {len(planted)} faults in {len(trials)} architectures are found at the right tap"
        text += f" ({100 * num_found / len(planted):.1f} %); {enough} architectures have three faults or more."
    runs = [item.run for by_dtype in results.values() for item in by_dtype.values() if item.word == "pass" and item.run]
    by_control = [tap.local_bound_share_max or 0.0 for run in runs for tap in run.taps if tap.is_bounded_by_control]
    if by_control:
        text += (
            f"\n{len(by_control)} taps of sound runs are bounded by their control, {CONTROL_FACTOR:g} times what it "
        )
        text += f"loses: the largest share of such a bound is {max(by_control):.2f}."
    return text


if __name__ == "__main__":
    main()
