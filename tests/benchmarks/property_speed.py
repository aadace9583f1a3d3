"""Measure the property suites: examples a second, time of the profiles, and how soon a known bug is found.

    OMP_NUM_THREADS=1 python tests/benchmarks/property_speed.py [--seeds 10] [--out reports/cpu/properties.md]

A bug's figure is the number of examples until a property breaks, over several seeds; making the example small is not
counted. `> n` means that some seed did not find it within n examples. Mutants of the Triton kernels are among them
where triton is installed and TRITON_INTERPRET=1 has the kernels interpreted.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import hypothesis
import hypothesis.core
import torch
from hypothesis import Phase, given, seed, settings
from tabulate import tabulate

from harness.properties.attention.suite import check_definition
from harness.properties.blocks.suite import search_block_manager
from harness.properties.core import falsify
from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES
from harness.properties.engine.suite import check_engine
from harness.properties.ops.test_ops import CHECKS
from harness.properties.reference.attention import PagedSubject
from harness.properties.reference.blocks import BlockManagerSubject
from harness.properties.reference.engine import EngineSubject
from harness.properties.reference.ops import Ops
from harness.properties.reference.scheduler import SchedulerSubject
from harness.properties.scheduler.suite import search_scheduler

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the mutants and the managers are the tests'

from tests.unit.properties import model_mutants  # noqa: E402
from tests.unit.properties.attention import kernel_mutants  # noqa: E402
from tests.unit.properties.blocks.chained import ChainedManager  # noqa: E402
from tests.unit.properties.blocks.mutants import BLOCK_MUTANTS  # noqa: E402
from tests.unit.properties.blocks.radix import RadixManager  # noqa: E402
from tests.unit.properties.blocks.test_blocks import BUGS  # noqa: E402
from tests.unit.properties.scheduler import mutants as scheduler_mutants  # noqa: E402
from tests.unit.properties.scheduler.mutants import SCHEDULER_MUTANTS  # noqa: E402
from tests.unit.properties.scheduler.test_scheduler import BUGS as SCHEDULER_BUGS  # noqa: E402
from tests.unit.properties.scheduler.two_phase import TwoPhaseScheduler  # noqa: E402

MOST_EXAMPLES = 2_000
MOST_OF_A_PROPERTY = 500
"""Fewer, of attention, the operations and the engine: those that a mutant does not break run all of theirs first."""
SUITES = ROOT / "harness" / "properties"
HAS_KERNELS = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
SEARCHES = {"BlockManager": search_block_manager, "Scheduler": search_scheduler}
Bug = tuple[str, str, Callable[..., Any], AbstractContextManager[None]]


def search(suite: str, factory: Callable[..., Any], chosen: settings, number: int) -> tuple[int, int | None]:
    """Return how many examples were tried and which invariant broke; `number` chooses the examples."""
    with patch.object(hypothesis.core, "global_force_seed", number):
        report = SEARCHES[suite](factory, chosen, is_first_enough=True)
    return report.num_examples, report.findings[0].invariant if report.findings else None


def speeds() -> Iterator[list[object]]:
    """Yield one row for each correct subject and profile; `ci` for our own only."""
    subjects: list[tuple[str, Callable[..., Any]]] = [
        ("BlockManager", BlockManagerSubject),
        ("BlockManager", ChainedManager),
        ("BlockManager", RadixManager),
        ("Scheduler", SchedulerSubject),
        ("Scheduler", TwoPhaseScheduler),
    ]
    for suite, factory in subjects:
        for name in ("dev", "ci") if factory in (BlockManagerSubject, SchedulerSubject) else ("dev",):
            start = time.perf_counter()
            num_examples, invariant = search(suite, factory, PROFILES[name].settings(), 0)
            seconds = time.perf_counter() - start
            assert invariant is None, f"{factory.__qualname__} violates invariant {invariant}"
            yield [suite, factory.__qualname__, name, num_examples, f"{seconds:.1f}", f"{num_examples / seconds:.0f}"]


def call_speeds() -> Iterator[list[object]]:
    """Yield one row for each suite that draws batches, workloads or inputs rather than sequences of calls."""
    checks: dict[str, Callable[[settings], None]] = {
        "attention": lambda chosen: check_definition(PagedSubject, chosen, "any"),
        "engine": lambda chosen: check_engine(EngineSubject, chosen, "all"),
    }
    for name, (check, _) in CHECKS.items():
        checks[f"ops: {name}"] = partial(check, Ops)
    for name, run in checks.items():
        start = time.perf_counter()
        with counting(0) as examples:
            run(settings(PROFILES["dev"].settings(), derandomize=False))
        seconds = time.perf_counter() - start
        yield [name, "reference", "dev", examples.total, f"{seconds:.1f}", f"{examples.total / seconds:.0f}"]


def suites(profile: str) -> Iterator[list[object]]:
    """Yield the time of each suite on the reference engine, in one run of pytest, and of the whole run."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0", "--durations-min=0",
        "--properties-profile", profile, str(SUITES),
    ]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    whole = time.perf_counter() - start
    assert done.returncode == 0, done.stdout
    seconds: defaultdict[str, float] = defaultdict(float)
    for match in re.finditer(r"^([\d.]+)s \w+ +\S*/test_(\w+)\.py::", done.stdout, re.MULTILINE):
        seconds[match[2]] += float(match[1])
    yield from ([name, f"{seconds[name]:.1f}"] for name in sorted(seconds))
    yield ["all, with the start of pytest", f"{whole:.1f}"]


@dataclass(slots=True)
class Examples:
    """Examples that were tried, of all properties, and of the one that was tried last."""

    total: int = 0
    of_the_last: int = 0


@contextmanager
def counting(number: int) -> Iterator[Examples]:
    """Seed what `falsify` searches for, count its examples, and have it stop at the first that breaks."""
    counts = Examples()

    def counted(inputs: Any) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
        counts.of_the_last = 0

        def decorate(run: Callable[[Any], None]) -> Callable[[], None]:
            def call(value: Any) -> None:
                counts.total += 1
                counts.of_the_last += 1
                run(value)

            return seed(number)(given(inputs)(call))

        return decorate

    phases, falsify.PHASES = falsify.PHASES, (Phase.generate,)
    falsify.given = counted  # type: ignore[assignment]
    try:
        yield counts
    finally:
        falsify.PHASES, falsify.given = phases, given


def killed(mutant: model_mutants.Mutant | kernel_mutants.Mutant, num_seeds: int) -> list[object]:
    """Return one row: how soon a mutant of attention, the kernels, the operations or the engine is found."""
    chosen = settings(PROFILES["dev"].settings(), max_examples=MOST_OF_A_PROPERTY, derandomize=False)
    counts, properties = [], Counter[str]()
    for number in range(num_seeds):
        with mutant.planted(), counting(number) as examples:
            try:
                mutant.suite(chosen)
            except PropertyError as error:
                properties[error.property.partition(":")[0]] += 1
                counts.append(max(1, examples.of_the_last - 1))  # the failing one is run twice
    missed = num_seeds - len(counts)
    most = f"> {MOST_OF_A_PROPERTY}" if missed else max(counts)
    counts += [MOST_OF_A_PROPERTY] * missed
    spelt = "; ".join(text for text, _ in properties.most_common())
    return [mutant.name, median(counts), min(counts), most, f"{num_seeds - missed}/{num_seeds}", spelt]


def bugs() -> Iterator[Bug]:
    """Yield what has to be found."""
    for manager, _ in BUGS:
        yield _name(manager), "BlockManager", manager, nullcontext()
    for scheduler, _ in SCHEDULER_BUGS:
        yield _name(scheduler), "Scheduler", scheduler, nullcontext()
    for mutant in BLOCK_MUTANTS:
        yield f"mutant: {mutant.name}", "BlockManager", BlockManagerSubject, mutant.planted()
    for mutant in SCHEDULER_MUTANTS:
        yield f"mutant: {mutant.name}", "Scheduler", SchedulerSubject, mutant.planted()


def bug_row(bug: Bug, num_seeds: int) -> list[object]:
    """Return one row: how soon a bug is found."""
    name, suite, factory, planted = bug
    chosen = settings(PROFILES["dev"].settings(), max_examples=MOST_EXAMPLES, derandomize=False)
    with planted:
        results = [search(suite, factory, chosen, number) for number in range(num_seeds)]
    counts = sorted(count for count, _ in results)
    invariants = Counter(invariant for _, invariant in results)
    missed = invariants.pop(None, 0)
    most = f"> {MOST_EXAMPLES}" if missed else counts[-1]
    spelt = ", ".join(str(invariant) for invariant, _ in invariants.most_common())
    return [name, median(counts), counts[0], most, f"{num_seeds - missed}/{num_seeds}", spelt]


def survivors() -> str:
    """Return the mutants that nothing kills, with the reason that stands above each."""
    lines = []
    for module in (scheduler_mutants, model_mutants, *([kernel_mutants] if HAS_KERNELS else [])):
        source = Path(str(module.__file__)).read_text(encoding="utf-8").partition("\nSURVIVORS = [\n")[2]
        for match in re.finditer(r"((?: +#.*\n)+) +[Mm]utant\(\s*\"([^\"]+)\"", source):
            reason = " ".join(line.strip(" #") for line in match[1].splitlines())
            lines.append(f"- {match[2]}: {reason}")
    return "\n".join(lines)


def _name(kind: type) -> str:
    return f"{kind.__module__.rpartition('.')[2]}: {kind.__name__}"


def main() -> None:
    """Measure everything and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--engine-seeds", type=int, default=3, help="of mutants of all but blocks")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "cpu" / "properties.md")
    options = parser.parse_args()
    speed_rows = [*speeds(), *call_speeds()]
    suite_rows = [[dev[0], dev[1], ci[1]] for dev, ci in zip(suites("dev"), suites("ci"), strict=True)]
    bug_rows = [bug_row(bug, options.seeds) for bug in bugs()]
    mutant_rows = [killed(mutant, options.engine_seeds) for mutant in model_mutants.MUTANTS]
    if HAS_KERNELS:
        for mutant in kernel_mutants.MUTANTS:
            name, *figures = killed(mutant, options.engine_seeds)
            mutant_rows.append([f"Triton: {name}", *figures])
    speed = tabulate(
        speed_rows,
        ["suite", "subject", "profile", "examples", "seconds", "examples/s"],
        "github",
        disable_numparse=True,
    )
    suite = tabulate(suite_rows, ["suite", "dev, s", "ci, s"], "github", disable_numparse=True)
    bug = tabulate(
        bug_rows, ["bug", "median", "fewest", "most", "found", "invariants"], "github", disable_numparse=True
    )
    header = ["mutant", "median", "fewest", "most", "found", "property"]
    mutants = tabulate(mutant_rows, header, "github", disable_numparse=True)
    versions = (
        f"{platform.machine()}, {torch.get_num_threads()} threads, Python {platform.python_version()}, torch "
        f"{torch.__version__}, Hypothesis {hypothesis.__version__}"
    )
    command = " ".join(["python tests/benchmarks/property_speed.py", *sys.argv[1:]])
    options.out.write_text(
        f"# Property suites\n\n`{command}`, {date.today()}. {versions}.\n\n"
        f"## Examples a second\n\n{speed}\n\n"
        f"## Time of the profiles\n\nOn the reference engine, all suites in one run of pytest.\n\n{suite}\n\n"
        f"## Examples until a known bug is found\n\nOver {options.seeds} seeds, at most {MOST_EXAMPLES} examples each; "
        f"the invariants in the order of how often they were named.\n\n{bug}\n\n"
        "## Examples until a mutant of attention, kernels, operations or engine is found\n\n"
        f"Over {options.engine_seeds} seeds, at most {MOST_OF_A_PROPERTY} examples of each property, of which those of "
        f"the one that breaks are counted.\n\n{mutants}\n\n"
        f"## Survivors\n\n{survivors()}\n"
    )


if __name__ == "__main__":
    main()
