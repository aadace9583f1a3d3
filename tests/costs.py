"""How long tests take, so that the default suite runs a sample of the expensive ones.

    pytest --junitxml=suite.xml && python -m tests.costs suite.xml > tests/costs.txt

writes the mean seconds of a case of each expensive test. `pytest -m slow` runs what the default suite leaves out.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from zlib import crc32

EXPENSIVE_S = 0.2
"""Seconds of a case from which on a test is sampled."""
SLOW_S = 3.0
"""Seconds of a case from which on it is slow, whatever else its file has."""
FILE_S, FILE_SHARE = 0.7, 0.1
"""The expensive tests of a file may take so many seconds, or this share of what all of them take if that is more."""
COSTS = Path(__file__).with_suffix(".txt")


@cache
def mean_costs() -> dict[str, float]:
    """Return the seconds of a case by the name of its test, `tests/unit/test_a.py::test_b`."""
    lines = COSTS.read_text(encoding="utf-8").splitlines() if COSTS.is_file() else []
    pairs = (line.split() for line in lines if not line.startswith("#"))
    return {test: float(seconds) for seconds, test in pairs}


def too_expensive(cases: Sequence[str], costs: Mapping[str, float]) -> set[str]:
    """Return the cases of a file that the default suite leaves out, by their node ids.

    Each file keeps one expensive case at least, if it has one that is not slow. Which ones it keeps depends on their
    names alone, and other tests come before a second case of the same test.
    """
    cost_of = {case: costs[test] for case in cases if (test := case.partition("[")[0]) in costs}
    turns: dict[str, int] = defaultdict(int)
    order = []
    for case in sorted(cost_of, key=lambda case: crc32(case.encode())):
        test = case.partition("[")[0]
        order.append((turns[test], len(order), case))
        turns[test] += 1
    left = max(FILE_S, FILE_SHARE * sum(cost_of.values()))
    left_out, keeps_any = set(), False
    for _, _, case in sorted(order):
        if cost_of[case] >= SLOW_S or (keeps_any and cost_of[case] > left):
            left_out.add(case)
        else:
            left, keeps_any = left - cost_of[case], True
    return left_out


def measured(junit: Path) -> dict[str, float]:
    """Return the mean seconds of a case of each expensive test; of one that did not run, what is known."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(junit).iter("testcase"):
        if case.find("skipped") is None and "name" in case.attrib:  # a suite that was interrupted has others, too
            test = case.attrib["name"].partition("[")[0]
            path = case.attrib["classname"].replace(".", "/")
            seconds[f"{path}.py::{test}"].append(float(case.attrib["time"]))
    means = mean_costs() | {test: sum(times) / len(times) for test, times in seconds.items()}
    return {test: mean for test, mean in means.items() if mean >= EXPENSIVE_S}


def main(junit: Path) -> None:
    """Print the table."""
    print("# Mean seconds of a case, of tests that the default suite samples (tests/costs.py).")
    for test, mean in sorted(measured(junit).items()):
        print(f"{mean:.2f} {test}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
