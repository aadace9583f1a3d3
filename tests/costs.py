"""How long the cases of a test take, so that the default suite runs a sample of dear ones.

    pytest --junitxml=suite.xml && python -m tests.costs suite.xml > tests/costs.txt

writes the mean of each parametrized test whose cases together take more than its share. `pytest -m slow` runs the rest.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from functools import cache
from pathlib import Path

SHARE_S = 1.0
"""Seconds that the cases of one test may take in the default suite; one case always runs."""
COSTS = Path(__file__).with_suffix(".txt")


@cache
def mean_costs() -> dict[str, float]:
    """Return the seconds of a case by the name of its test, `tests/unit/test_a.py::test_b`."""
    lines = COSTS.read_text(encoding="utf-8").splitlines() if COSTS.is_file() else []
    pairs = (line.split() for line in lines if not line.startswith("#"))
    return {test: float(seconds) for seconds, test in pairs}


def num_affordable(test: str, num_cases: int) -> int:
    """Return how many cases of a test the default suite runs."""
    cost = mean_costs().get(test)
    return num_cases if cost is None else min(num_cases, max(1, int(SHARE_S / cost)))


def measured(junit: Path) -> dict[str, float]:
    """Return the mean seconds of the cases of each parametrized test that takes more than its share."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(junit).iter("testcase"):
        if case.find("skipped") is None:
            test, bracket, _ = case.attrib["name"].partition("[")
            path = case.attrib["classname"].replace(".", "/")
            if bracket:
                seconds[f"{path}.py::{test}"].append(float(case.attrib["time"]))
    means = {test: sum(times) / len(times) for test, times in seconds.items()}
    return {
        test: mean for test, mean in means.items() if mean * len(seconds[test]) > SHARE_S and len(seconds[test]) > 1
    }


def main(junit: Path) -> None:
    """Print the table."""
    print("# Seconds of a case in the mean, of tests that the default suite samples (tests/costs.py).")
    for test, mean in sorted(measured(junit).items()):
        print(f"{mean:.2f} {test}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
