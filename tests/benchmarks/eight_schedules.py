"""What eight schedules cost in a check that three would cost otherwise: parts by schedule, in one process.

CPU seconds of the default three schedules and of eight, in turn, with their goldens in the cache. Not counted in the
ratio: the engine's runs, goldens, and the search for the power of a pass. The parts are those of `check_cost`, and

- digests of rows: which rows an earlier schedule had, and their errors of then (`SeenRows`);
- reading: opening recordings, and taking rows out of them, wherever that is asked for.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.eight_schedules [--layers 2] [--vocabulary 2000] [--times 3]
"""

import argparse
import functools
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tabulate import tabulate

from harness.base.memory import collect_rarely
from harness.formats.case import RequestSpec
from harness.formats.schedule import DEFAULT_SCHEDULES
from harness.judge.jobs import check as job
from harness.judge.jobs.check import run_check
from harness.plan import plan_request
from tests.benchmarks.check_cost import PARTS, REST, SHAPE, SMALL, Stopwatch, save

THREE = tuple(map(str, DEFAULT_SCHEDULES))
EIGHT = (*THREE, "mixed", "prefix-hit", "forked", "preempted", "rewound")
LENGTHS = (100, 80, 60)
NEW_TOKENS = 8
GOLDENS, READING = "goldens", "reading"
NOT_COUNTED = ("engine", GOLDENS, "search for the power")
MEASURED: Mapping[str, tuple[str, ...]] = {
    **{part: names for part, names in PARTS.items() if not part.startswith("golden")},
    GOLDENS: (
        *(name for part, names in PARTS.items() if part.startswith("golden") for name in names),
        "harness.judge.jobs.check:with_duplicate_requests",
        "harness.judge.jobs.check:checked_golden",
        "harness.judge.jobs.check:open_cached_golden",
    ),
    "digests of rows": ("harness.judge.compare.seen:SeenRows",),
    READING: (
        "harness.formats.recording:Recording.open",
        "harness.formats.recording.reader:Located.rows",
        "harness.formats.recording.reader:Recording.located",
    ),
}
COUNTED = (*(part for part in MEASURED if part not in NOT_COUNTED), REST)
BEFORE = "before and after"
"""The name under which what no schedule takes is counted."""


class Watch(Stopwatch):
    """Reading is of the part that reads, where that does not count."""

    def _switched(self, part: str) -> str:
        return super()._switched(self._part if part == READING and self._part in NOT_COUNTED else part)


def check(folder: Path, schedules: Sequence[str], vocabulary: int) -> dict[str, Counter[str]]:
    """Run one check; return its parts by schedule."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]
    plan = plan_request(
        model=str(folder), engine="reference", dtype="float32", device="cpu", max_new_tokens=NEW_TOKENS,
        requests=[RequestSpec(token_ids=tokens) for tokens in prompts], schedules=list(schedules),
        local_files_only=True,
    )  # fmt: skip
    watch, spent = Watch(), dict[str, Counter[str]]()
    run_schedule = job._run_schedule

    @functools.wraps(run_schedule)
    def measured(*args: Any, **kwargs: Any) -> Any:
        spent.setdefault(BEFORE, Counter()).update(watch.lap())
        try:
            return run_schedule(*args, **kwargs)
        finally:
            spent[str(args[2])] = watch.lap()

    with patch.object(job, "_run_schedule", measured), watch.on(MEASURED):
        result = run_check(plan)
    spent[BEFORE].update(watch.lap())
    if any(run.findings for run in result.runs):
        sys.exit(f"a check that is to pass has findings: {[run.findings for run in result.runs if run.findings]}")
    seen = {run.schedule: run.coverage.rows_seen_before / run.num_rows for run in result.runs}
    sys.stderr.write("seen before: " + ", ".join(f"{name} {share:.0%}" for name, share in seen.items()) + "\n")
    return spent


def total(parts: Mapping[str, float]) -> float:
    """Return the seconds that count."""
    return sum(seconds for part, seconds in parts.items() if part not in NOT_COUNTED)


def summed(spent: Mapping[str, Counter[str]]) -> Counter[str]:
    """Return the parts of a whole check."""
    return sum(spent.values(), Counter[str]())


def by_schedule(runs: Sequence[Mapping[str, Counter[str]]]) -> str:
    """Return the table of the parts of each schedule: medians of the runs."""
    names = [*runs[0]]
    middle = {
        name: {part: statistics.median(run[name][part] for run in runs) for part in (*COUNTED, *NOT_COUNTED)}
        for name in names
    }
    rows = [
        [part, *(f"{middle[name][part]:.2f}" for name in names)]
        for part in (*COUNTED, *NOT_COUNTED)
        if any(middle[name][part] >= 0.005 for name in names)
    ]
    rows.append(["what counts", *(f"{total(middle[name]):.2f}" for name in names)])
    return tabulate(rows, ("CPU seconds", *names), tablefmt="github", disable_numparse=True)


def compared(three: Sequence[Counter[str]], eight: Sequence[Counter[str]]) -> str:
    """Return the table of both checks: medians, with the smallest and the largest."""

    def spread(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    rows = [[part, *(spread([run[part] for run in runs]) for runs in (three, eight))] for part in COUNTED]
    rows = [row for row, part in zip(rows, COUNTED, strict=True) if any(run[part] >= 0.005 for run in eight)]
    sums = [[total(run) for run in runs] for runs in (three, eight)]
    rows.append(["what counts", *map(spread, sums)])
    rows.append(["ratio", "1", spread([of_eight / of_three for of_three, of_eight in zip(*sums, strict=True)])])
    rows += [[part, *(spread([run[part] for run in runs]) for runs in (three, eight))] for part in NOT_COUNTED]
    return tabulate(rows, ("CPU seconds", "three", "eight"), tablefmt="github", disable_numparse=True)


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.eight_schedules")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a narrower model, to see that this runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    collect_rarely()  # as the command does
    shape = {**(SMALL if options.small else SHAPE), "vocab_size": options.vocabulary}
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ, HARNESS_CACHE=f"{name}/cache"):
        folder = Path(name) / "model"
        save(folder, shape, options.layers, "float32")
        check(folder, EIGHT, options.vocabulary)  # imports, the goldens and projected weights
        pairs = [[check(folder, names, options.vocabulary) for names in (THREE, EIGHT)] for _ in range(options.times)]
    three, eight = zip(*pairs, strict=True)
    sys.stdout.write(by_schedule(eight) + "\n\n" + compared([*map(summed, three)], [*map(summed, eight)]) + "\n")


if __name__ == "__main__":
    main()
