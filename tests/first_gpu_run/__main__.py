"""python -m tests.first_gpu_run OUT: every step for which there is time, and that no earlier call has done.

A failure stops nothing. A step that failed is tried again by the next call. `--resume ARCHIVE` begins with the results
of a call on another machine.
"""

import argparse
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

from .archive import NAME, pack, unpack
from .machine import environment
from .steps import PRETENDED_STEPS, STEPS, Step
from .summary import write_summary
from .work import StepResult, do_step, kept_result


def run_steps(steps: Sequence[Step], out: Path, *, budget_s: float, only: Collection[str] = ()) -> bool:
    """Run what is not done, while the time lasts; return whether all of it is done."""
    begin, variables = time.monotonic(), environment(out)
    chosen = [step for step in steps if not only or step.name in only]
    for group in _groups(chosen):
        left = budget_s - (time.monotonic() - begin)
        due = [step for step in group if not _is_done(step, out) and left >= step.usual_s]
        if not due:
            continue
        with ThreadPoolExecutor(len(due)) as threads:
            running = [
                threads.submit(do_step, step, out, limit_s=min(step.limit_s, left), environment=variables)
                for step in due
            ]
            for step, result in zip(due, running, strict=True):
                _keep(step, result.result(), steps, out)
    return all(_is_done(step, out) for step in chosen)


def _groups(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Put neighbours that time nothing into one group: they run side by side."""
    for is_timed, neighbours in groupby(steps, key=lambda step: step.is_timed):
        group = list(neighbours)
        yield from [[step] for step in group] if is_timed else [group]


def _is_done(step: Step, out: Path) -> bool:
    kept = kept_result(step.name, out)
    return kept is not None and kept.is_done


def _keep(step: Step, result: StepResult, steps: Sequence[Step], out: Path) -> None:
    result.keep(out)
    write_summary(steps, out)
    pack(out)
    print(f"{step.name}: {result.left_out or result.statuses} after {result.seconds:g} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 where every step is done, 1 where some failed or had no time."""
    parser = argparse.ArgumentParser(prog="python -m tests.first_gpu_run")
    parser.add_argument("out", type=Path, help="folder of the results; what is there is not done again")
    parser.add_argument("--budget", type=float, default=560, metavar="SECONDS", help="of this call [default: 560]")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps alone")
    parser.add_argument("--resume", type=Path, metavar="ARCHIVE", help=f"{NAME} of an earlier call")
    parser.add_argument("--pretended", action="store_true", help="on the device that is not there, on small shapes")
    options = parser.parse_args(arguments)
    steps = PRETENDED_STEPS if options.pretended else STEPS
    if unknown := set(options.only or ()) - {step.name for step in steps}:
        parser.error(f"unknown steps: {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in steps)}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.resume is not None:
        unpack(options.resume, out)
    is_done = run_steps(steps, out, budget_s=options.budget, only=options.only or ())
    print(f"{out / NAME} holds all results; {out / 'summary.md'} says what ran")
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main())
