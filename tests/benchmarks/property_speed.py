"""Measure the property suites: examples a second, time of the profiles, and how soon a known bug is found.

    python tests/benchmarks/property_speed.py [--seeds 10] [--suites test_blocks ...] [--out reports/cpu/properties.md]

A bug's figure is the number of examples until an invariant breaks, over several seeds; making the example small is not
counted. `> n` means that some seed did not find it within n examples.
"""

import argparse
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import hypothesis
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test
from tabulate import tabulate

from harness.properties.blocks import BlockManagerMachine
from harness.properties.profiles import PROFILES
from harness.properties.reference import BlockManager, Scheduler
from harness.properties.scheduler import SchedulerMachine
from harness.properties.subject import Violation

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the mutants and the managers are the tests'

from tests.unit.properties.block_mutants import BLOCK_MUTANTS, SCHEDULER_MUTANTS  # noqa: E402
from tests.unit.properties.managers.chained import ChainedManager  # noqa: E402
from tests.unit.properties.managers.radix import RadixManager  # noqa: E402
from tests.unit.properties.managers.two_phase import TwoPhaseScheduler  # noqa: E402
from tests.unit.properties.test_managers import BUGS, SCHEDULER_BUGS  # noqa: E402

MOST_EXAMPLES = 2_000
SUITES = ROOT / "harness" / "properties"
Machine = type[BlockManagerMachine] | type[SchedulerMachine]
Bug = tuple[str, Machine, Callable[..., Any], AbstractContextManager[None]]


def search(machine: Machine, factory: Callable[..., Any], chosen: settings, number: int) -> tuple[int, int | None]:
    """Return how many examples were tried and which invariant broke."""
    num_examples = 0

    @seed(number)
    def make() -> BlockManagerMachine | SchedulerMachine:
        nonlocal num_examples
        num_examples += 1
        return machine(factory)

    try:
        run_state_machine_as_test(make, settings=chosen)
    except Violation as violation:
        return max(1, num_examples - 1), violation.invariant  # the failing one is run twice
    return num_examples, None


def speeds() -> Iterator[list[object]]:
    """Yield one row for each correct subject and profile; `ci` for our own only."""
    subjects: list[tuple[Machine, Callable[..., Any]]] = [
        (BlockManagerMachine, BlockManager),
        (BlockManagerMachine, ChainedManager),
        (BlockManagerMachine, RadixManager),
        (SchedulerMachine, Scheduler),
        (SchedulerMachine, TwoPhaseScheduler),
    ]
    for machine, factory in subjects:
        for name in ("dev", "ci") if factory in (BlockManager, Scheduler) else ("dev",):
            start = time.perf_counter()
            num_examples, invariant = search(machine, factory, PROFILES[name].settings(), 0)
            seconds = time.perf_counter() - start
            assert invariant is None, f"{factory.__qualname__} violates invariant {invariant}"
            suite = machine.__name__.removesuffix("Machine")
            yield [suite, factory.__qualname__, name, num_examples, f"{seconds:.1f}", f"{num_examples / seconds:.0f}"]


def suites(names: Sequence[str]) -> Iterator[list[object]]:
    """Yield the time of the ci profile of each suite on the reference engine, start of pytest included."""
    for name in names:
        path = SUITES / f"{name}.py"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--properties-profile",
            "ci",
            str(path),
        ]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        yield [name, done.stdout.strip().splitlines()[-1].strip("= "), f"{time.perf_counter() - start:.1f}"]


def bugs() -> Iterator[Bug]:
    """Yield what has to be found."""
    for manager, _ in BUGS:
        yield _name(manager), BlockManagerMachine, manager, nullcontext()
    for scheduler, _ in SCHEDULER_BUGS:
        yield _name(scheduler), SchedulerMachine, scheduler, nullcontext()
    for mutant in BLOCK_MUTANTS:
        yield f"mutant: {mutant.name}", BlockManagerMachine, BlockManager, mutant.planted()
    for mutant in SCHEDULER_MUTANTS:
        yield f"mutant: {mutant.name}", SchedulerMachine, Scheduler, mutant.planted()


def found(bug: Bug, num_seeds: int) -> list[object]:
    """Return one row: how soon a bug is found."""
    name, machine, factory, planted = bug
    chosen = settings(PROFILES["dev"].settings(), max_examples=MOST_EXAMPLES, derandomize=False)
    with planted:
        results = [search(machine, factory, chosen, number) for number in range(num_seeds)]
    counts = sorted(count for count, _ in results)
    invariants = Counter(invariant for _, invariant in results)
    missed = invariants.pop(None, 0)
    most = f"> {MOST_EXAMPLES}" if missed else counts[-1]
    spelt = ", ".join(str(invariant) for invariant, _ in invariants.most_common())
    return [name, median(counts), counts[0], most, f"{num_seeds - missed}/{num_seeds}", spelt]


def _name(kind: type) -> str:
    return f"{kind.__module__.rpartition('.')[2]}: {kind.__name__}"


def main() -> None:
    """Measure everything and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--suites", nargs="+", default=sorted(path.stem for path in SUITES.glob("test_*.py")))
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "cpu" / "properties.md")
    options = parser.parse_args()
    speed_rows, suite_rows = list(speeds()), list(suites(options.suites))
    bug_rows = [found(bug, options.seeds) for bug in bugs()]
    speed = tabulate(
        speed_rows,
        ["suite", "subject", "profile", "examples", "seconds", "examples/s"],
        "github",
        disable_numparse=True,
    )
    suite = tabulate(suite_rows, ["suite", "pytest says", "seconds"], "github", disable_numparse=True)
    bug = tabulate(
        bug_rows, ["bug", "median", "fewest", "most", "found", "invariants"], "github", disable_numparse=True
    )
    versions = f"{platform.machine()}, Python {platform.python_version()}, Hypothesis {hypothesis.__version__}"
    command = " ".join(["python tests/benchmarks/property_speed.py", *sys.argv[1:]])
    options.out.write_text(
        f"# Property suites\n\n`{command}`, {date.today()}. {versions}. Other work shared the machine while this was "
        "measured: times are upper bounds, numbers of examples are not affected.\n\n"
        f"## Examples a second\n\n{speed}\n\n"
        f"## The `ci` profile of each suite\n\nOn the reference engine, the start of pytest included.\n\n{suite}\n\n"
        f"## Examples until a known bug is found\n\nOver {options.seeds} seeds, at most {MOST_EXAMPLES} examples each; "
        f"the invariants in the order of how often they were named.\n\n{bug}\n"
    )


if __name__ == "__main__":
    main()
