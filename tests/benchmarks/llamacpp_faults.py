"""Faults planted in the file that llama.cpp loads, in every type: where the first divergence is, and what is named.

    python -m tests.benchmarks.llamacpp_faults --model PATH [--types F32,Q8_0,Q4_K] [--engine-option repack=off]

The model is a Llama of three layers at least. It is filled up with zeros to rows of 256, exactly, which K-quants need.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

from tabulate import tabulate

from harness.extensions.llamacpp.gguf.header import PLAIN
from harness.extensions.quant.files import pad_checkpoint
from harness.formats.case import RequestSpec
from harness.judge.jobs.check import run_check
from harness.plan import plan_request

from ..faulty_gguf import FAULTS, write_faulty, write_typed

TYPES = "F32,F16,BF16,Q8_0,Q6_K,Q5_K,Q4_K,Q4_0"
SIZES = (40, 9, 1)
"""Tokens of the prompts."""


def cells(sound: Path, faulty: Path, options: dict[str, str], prompts: list[list[int]]) -> list[str]:
    """Check a file that has a fault; return the first divergence and its cause."""
    plan = plan_request(
        model=str(sound),
        engine="llamacpp",
        engine_options={**options, "gguf": str(faulty)},
        requests=[RequestSpec(token_ids=ids) for ids in prompts],
        max_new_tokens=8,
        schedules=["plain"],
    )
    (run,) = run_check(plan).runs
    first = run.first_divergence
    if first is None:
        return [str(run.outcome.value), "-", "-", "-"]
    where = f"request {first.request}, position {first.position}"
    cause = first.explanation.cause if first.explanation else "-"
    detail = (first.explanation.detail or "") if first.explanation else ""
    return [str(run.outcome.value), first.tap, where, f"{cause} ({detail})" if detail else cause]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--engine-option", action="append", default=[])
    arguments = parser.parse_args()
    options = {"repack": "off"} | dict(option.split("=", 1) for option in arguments.engine_option)
    draw, rows = random.Random(0), []
    prompts = [[draw.randrange(3, 250) for _ in range(size)] for size in SIZES]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        padded = pad_checkpoint(arguments.model, folder / "padded")
        for word in arguments.types.split(","):
            sound = write_typed(padded, folder / f"{word}.gguf", word)
            for fault in arguments.faults.split(","):
                if word in PLAIN and "scales" in fault:
                    continue
                begin = time.process_time()
                faulty = write_faulty(padded, folder / "faulty.gguf", word, fault)
                rows.append([word, fault, *cells(sound, faulty, options, prompts)])
                print(f"{time.process_time() - begin:.1f} s", *rows[-1], sep=" | ", flush=True)
                faulty.unlink()
    headers = ["type", "fault", "verdict", "first divergence", "at", "cause"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
