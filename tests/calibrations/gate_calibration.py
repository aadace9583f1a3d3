"""How often `harness gate --against` raises a false alarm, and how often it finds 5 %.

    python -m tests.calibrations.gate_calibration [--rounds 60] [--slowdown 0.05] [--out FILE]

Times the reference engine against itself, and against a copy whose steps take longer by a known share of their CPU
time, each in so many rounds (pairs of processes). A gate has the rounds that fit into its time, so gates are
drawn from the measured rounds, and what each would say is counted.
"""

import argparse
import datetime
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np
from tabulate import tabulate

from harness.base.environment import describe_machine
from harness.base.files import scratch_folder
from harness.base.progress import no_progress
from harness.profiling.gate import against
from harness.profiling.gate.against import BLOCKS_OF_A_ROUND, TimingLength, paired_ratio
from harness.profiling.gate.versions import Version, installed_version
from harness.results.gate import Clock

ROOT = Path(__file__).parents[2]
PACKAGES = ("harness", "reference_engine")
TOLERANCE = 0.03
NUM_GATES = 400
PROFILE = {
    "engine": "reference", "model": str(ROOT / "cases" / "checkpoints" / "qwen3-tiny"), "dtype": "float32",
    "device": "cpu", "batch_size": 4, "prompt_tokens": 64, "max_new_tokens": 16, "environment": {},
}  # fmt: skip
SLOWER = """

import time as _time


def _slower(step):
    def slow(self, *args, **kwargs):
        begin = _time.process_time()
        found = step(self, *args, **kwargs)
        end = _time.process_time()
        while _time.process_time() < end + {share} * (end - begin):
            pass
        return found

    return slow


LLMEngine.step = _slower(LLMEngine.step)
"""


def slowed(now: Version, folder: Path, share: float) -> Version:
    """Return a copy whose steps take longer."""
    for package in PACKAGES:
        shutil.copytree(now.root / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "reference_engine" / "engine.py").open("a") as file:
        file.write(SLOWER.format(share=share))
    return Version(label="slowed", root=folder)


def measure(before: Version, after: Version, num_rounds: int) -> tuple[list[list[against._Block]], float]:
    """Return the blocks by round, and the seconds of a round with its share of everything else."""
    length = TimingLength(num_blocks=num_rounds * BLOCKS_OF_A_ROUND, seconds=1e9)
    spec = against._spec(PROFILE, PACKAGES)
    timing = against._Timing(before, after, spec, length, 0.0, no_progress, may_be_same=True)
    begin = time.perf_counter()
    timing.run()
    return timing._rounds, (time.perf_counter() - begin) / num_rounds


def _seconds(block: against._Block, phase: str, clock: Clock) -> tuple[float, float, float, float]:
    a, b, c, d = (run[phase][clock.value] for run in block)
    return a, b, c, d


def verdicts(rounds: list[list[against._Block]], phase: str, clock: Clock, num_rounds: int) -> Counter[str]:
    """Draw gates from the rounds and count what they say."""
    draw = np.random.default_rng(0)
    said: Counter[str] = Counter()
    for _ in range(NUM_GATES):
        drawn = [rounds[index] for index in draw.integers(0, len(rounds), num_rounds)]
        blocks = [_seconds(block, phase, clock) for one in drawn for block in one]
        groups = [index for index, one in enumerate(drawn) for _ in one]
        said[paired_ratio(blocks, tolerance=TOLERANCE, groups=groups).verdict.value] += 1
    return said


def table(rounds: list[list[against._Block]], num_rounds: int) -> str:
    rows = []
    for phase in rounds[0][0][0]:
        for clock in Clock:
            blocks = [_seconds(block, phase, clock) for round_blocks in rounds for block in round_blocks]
            groups = [index for index, round_blocks in enumerate(rounds) for _ in round_blocks]
            whole = paired_ratio(blocks, tolerance=TOLERANCE, groups=groups).ratio
            said = verdicts(rounds, phase, clock, num_rounds)
            medians = [
                np.median(
                    [(b + c) / (a + d) for a, b, c, d in (_seconds(block, phase, clock) for block in round_blocks)]
                )
                for round_blocks in rounds
            ]
            rows.append(
                [phase, clock.value, f"{whole.median:.4f} ({whole.low:.4f} to {whole.high:.4f})",
                 f"{np.std(np.log(medians), ddof=1):.2%}",
                 *(f"{said[name] / NUM_GATES:.1%}" for name in ("slower", "same", "faster", "inconclusive"))]
            )  # fmt: skip
    header = [
        "phase",
        "clock",
        "ratio of all rounds (99 %)",
        "spread of a round",
        "slower",
        "same",
        "faster",
        "inconclusive",
    ]
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--slowdown", type=float, default=0.05)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "cpu" / "gate.md")
    options = parser.parse_args()
    now, load_before = installed_version(PACKAGES), os.getloadavg()
    with scratch_folder("harness-") as folder:
        same, same_s = measure(now, now, options.rounds)
        slower, slower_s = measure(now, slowed(now, folder, options.slowdown), options.rounds)
    length, cores = TimingLength(), len(os.sched_getaffinity(0))
    num_rounds = min(int(length.seconds / max(same_s, slower_s)), length.num_blocks // BLOCKS_OF_A_ROUND)
    machine = describe_machine("cpu")
    loads = ", ".join(f"{load:.0f}" for load in (load_before[0], os.getloadavg()[0]))
    options.out.write_text(
        f"""# Calibration of the gate's time

`python -m tests.calibrations.gate_calibration --rounds {options.rounds} --slowdown {options.slowdown}`, \
{datetime.date.today()}. {machine.hardware}, {cores} of {os.cpu_count()} cores, shared: load average {loads} \
(before, after); {machine.software}.

{options.rounds} rounds of {BLOCKS_OF_A_ROUND} blocks A B B A of qwen3-tiny, 4 requests of 64 tokens, 16 new ones \
each. A round took {same_s:.1f} and {slower_s:.1f} s, a new pair of processes included, so that a gate of \
{length.seconds:.0f} s has {num_rounds} of them. {NUM_GATES} gates were drawn from the rounds, with \
replacement; the tolerance is {TOLERANCE:.0%}.

## The engine against itself

{table(same, num_rounds)}

## Against a copy whose steps take {options.slowdown:.0%} more CPU time

{table(slower, num_rounds)}

*Spread of a round*: standard deviation of the logarithm of the rounds' medians. CPU time decides, for this engine runs
in one thread; the wall time of the same runs stands beside it.
""",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
