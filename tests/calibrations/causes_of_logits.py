"""Which mistakes of the reference engine are named from its logits alone.

    python -m tests.calibrations.causes_of_logits [--seed 1] [--faults 40]

The engine's other taps are not recorded, so a line says what a user of an engine without tensors would read. Whether a
cause is true is for the reader: the patterns of the catalogue have the words of single operations.
"""

import argparse
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from harness.base.memory import collect_rarely
from harness.errors import HarnessError
from harness.extensions.faults.catalogue import FAULTS
from harness.extensions.faults.fault import EngineKind, Fault
from harness.extensions.faults.subject import opened
from harness.formats.recording import RecordingWriter
from harness.judge.jobs import check
from harness.results.check import Outcome


@contextmanager
def recording_logits_alone() -> Iterator[None]:
    """Leave out what an engine records besides its logits; goldens are recorded as ever."""
    record, write = check.record_run, RecordingWriter.tap

    def record_logits(*args: Any, **options: Any) -> Any:
        def only_logits(self: RecordingWriter, name: str, tensor: Any) -> None:
            if name == "lm_head":
                write(self, name, tensor)

        with patch.object(RecordingWriter, "tap", only_logits):
            return record(*args, **options)

    with patch.object(check, "record_run", record_logits):
        yield


def line(fault: Fault) -> str:
    """Check an engine with a fault, and return what is said of it."""
    try:
        with opened(fault, seed=0, device="cpu") as (subject, _planted), recording_logits_alone():
            assert subject.plan is not None
            result = check.run_check(subject.plan.changed(only="logits"))
    except HarnessError as error:
        return f"{fault.id}: {error.code}"
    first = result.runs[0].first_divergence
    said = None if first is None else first.explanation
    cause = said.cause if said is not None and said.is_cause else "-"
    return f"{fault.id}: {'seen' if result.outcome is Outcome.MISMATCH else 'not seen'}; {fault.summary} {cause}"


def main() -> None:
    """Print a line for each fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.calibrations.causes_of_logits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    collect_rarely()
    faults = [f for f in FAULTS.values() if f.engine is EngineKind.REFERENCE and f.suite is None and f.tap is not None]
    random.Random(options.seed).shuffle(faults)
    for fault in faults[: options.faults]:
        print(line(fault), flush=True)


if __name__ == "__main__":
    main()
