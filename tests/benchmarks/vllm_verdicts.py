"""Verdicts of the adapter of vLLM: families sound, and with the bugs of tests/vllm.

    python -m tests.benchmarks.vllm_verdicts [faults] [bugs] [families]

Prints a line for each family and bug: the outcome, the first divergence and its cause, the taps that are not shown.
"""

import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.benchmarks import vllm_families
from tests.vllm.conftest import FAMILIES, write_checkpoint
from tests.vllm.faults import FAULTS
from tests.vllm.test_check import check
from tests.vllm.test_families import BUGS, NOT_SHOWN, changed


@cache
def folder_of(family: str) -> Path:
    """Write the checkpoint of a family of the tests."""
    folder = Path(mkdtemp())
    if family in FAMILIES:
        return write_checkpoint(family, folder)
    vllm_families.write_checkpoint(family, folder)
    return folder


def line(family: str, bug: str, model: str | Path, schedule: str, num_tokens: int) -> str:
    """Check vLLM on a model, and return what came of it."""
    (run,) = check(model, schedules=[schedule], max_new_tokens=num_tokens).runs
    first = run.first_divergence
    causes = [finding.explanation.cause for finding in run.findings if finding.explanation is not None]
    told = f"{first.tap}: {first.explanation.cause}" if first is not None else ", ".join(causes[:1]) or "-"
    not_shown = ", ".join(run.coverage.not_offered) or "-"
    return f"| {family} | {bug} | {schedule} | {run.outcome.value} | {told} | {not_shown} |"


def main() -> None:
    """Run what is named, or all."""
    chosen = sys.argv[1:] or ["faults", "bugs", "families"]
    for fault in FAULTS if "faults" in chosen else ():
        with pytest.MonkeyPatch.context() as patch:
            fault.inject(patch)
            print(line("qwen3-tiny", fault.name, "qwen3-tiny", fault.schedule, 24), flush=True)
    for bug, (family, owner, attributes, _) in BUGS.items() if "bugs" in chosen else ():
        with pytest.MonkeyPatch.context() as patch:
            changed(patch, owner, **attributes)
            print(line(family, bug, folder_of(family), "plain", 3), flush=True)
    for family in [*NOT_SHOWN, *FAMILIES] if "families" in chosen else ():
        print(line(family, "sound", folder_of(family), "mixed", 12), flush=True)


if __name__ == "__main__":
    main()
