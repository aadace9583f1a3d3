"""What is said of a fault's cause, in architectures that no explanation was written for.

python -m tests.families.naming [--dtype float32] [ARCHITECTURE ...]
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from harness.engines.hf import HFEngine
from harness.extensions.faults.zoo.models import build
from harness.extensions.faults.zoo.quiet import quiet
from harness.formats.recording import Recording
from harness.judge.compare import compare_run
from harness.judge.explain import explain_run
from harness.judge.jobs.opened import record_run
from harness.results.check import Explanation

from .architectures import architectures
from .check import Subject, subject
from .faults import Fault, applicable

TRUTHS = {
    "attention_scale": r"softmax scale is|gain",
    "attention_softcap": r"soft cap",
    "attention_window": r"window",
    "attention_sinks": r"sink",
    "query_heads": r"another order|heads",
    "rope_theta": r"theta|frequencies are off",
    "norm_eps": r"eps",
    "norm_weight": r"weight is that of|weight",
    "linear_from_elsewhere": r"weights? (are|is)|without its bias|outputs are those|none of|not quite",
    "bias_dropped": r"bias",
    "gate_and_up": r"weights are those of|swapped|wrong order",
    "state_decay": r"A_log|decay|is scaled by 1.1|gain",
    "experts_swapped": r"swapped|computed with the weights of expert",
    "router_top_k": r"wrong top-k",
    "routed_scaling": r"scaling factor|gain|normalised to a sum of one after",
    "embedding_multiplier": r"gain|scaled|output is that of",
    "residual_multiplier": r"factor|gain",
    "logits_multiplier": r"gain|output is that of",
    "logits_softcap": r"output is that of|cap",
}
"""What may be said of each fault: what was done, or what gives the same numbers."""


def named(opened: Subject, fault: Fault) -> tuple[str, Explanation | None]:
    """Return where a fault was found first, and what was said of it."""
    engine = HFEngine(opened._load(), None)
    engine.match_taps(opened.oracle.graph)
    fault.inject(engine._hf.model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        record_run(opened.plan, engine, opened.plan.schedules[0], opened.golden.requests, path)
        with Recording.open(path, verify=False) as actual:
            comparison = compare_run(actual, opened.golden, hf=opened.oracle)
            first = explain_run(comparison, actual, opened.golden, opened.oracle).first_divergence
    return (first.tap, first.explanation) if first else ("nowhere", None)


def verdict(fault: str, explanation: Explanation | None) -> str:
    """Return `named`, `unnamed` or `WRONG`."""
    if explanation is None or not explanation.is_cause:
        return "unnamed"
    return "named" if re.search(TRUTHS[fault], f"{explanation.cause}; {explanation.detail}") else "WRONG"


def trials(name: str, dtype: str) -> Iterator[list[str]]:
    """Yield a line for every fault that applies to an architecture."""
    with quiet():
        faults = applicable(build(name))
    with subject(name, dtype) as opened:
        for fault in faults:
            tap, explanation = named(opened, fault)
            said = explanation.cause if explanation else ""
            yield [name, dtype, fault.name, tap, verdict(fault.name, explanation), said]


def main() -> None:
    """Print what was said of every fault, and how often it was true."""
    parser = argparse.ArgumentParser(prog="python -m tests.families.naming")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    counts = counted(trials, options.names or architectures(), options.dtype)
    table = [[fault, *(counts[fault, word] for word in ("named", "unnamed", "WRONG"))] for fault in TRUTHS]
    sys.stdout.write(tabulate(table, ["fault", "named", "unnamed", "named wrongly"], tablefmt="github") + "\n")


def counted(trials: Callable[[str, str], Iterator[list[str]]], names: Sequence[str], dtype: str) -> Counter[Any]:
    """Print every trial of some architectures as it ends; return how often each fault got each verdict."""
    counts = Counter[Any]()
    for name in names:
        try:
            for row in trials(name, dtype):
                counts[row[2], row[4]] += 1
                sys.stderr.write(" | ".join(row) + "\n")
        except Exception as error:
            sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")
    return counts


if __name__ == "__main__":
    main()
