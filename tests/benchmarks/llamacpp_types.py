"""llama.cpp under test in every type and cache type: verdicts, and the largest share of the bounds.

    python -m tests.benchmarks.llamacpp_types --model PATH [--types F32,Q8_0,Q4_K] [--repack on]

The model is filled up with zeros to rows of 256, exactly, so that K-quants apply to a small one.
"""

import argparse
import tempfile
from pathlib import Path

from tabulate import tabulate

from harness.extensions.quant.files import make_file, pad_checkpoint
from harness.formats.case import RequestSpec
from harness.judge.jobs.check import run_check
from harness.plan import plan_request

TYPES = "F32,F16,BF16,Q8_0,Q6_K,Q5_K,Q4_K,Q4_0,Q4_K_M,Q3_K,Q2_K"
CACHES = {
    "F32 cache": {"cache_type": "F32", "flash_attention": "off"},
    "F16 cache": {"cache_type": "F16", "flash_attention": "off"},
    "F16 cache, flash attention (the default)": {"cache_type": "F16", "flash_attention": "on"},
}
PROMPTS = ([1, 20, 21, 22, 23, 24, 25, 26, 27, 28], [1, 30, 31, 9, 10, 33], [5])


def cell(path: Path, options: dict[str, str]) -> str:
    """Check one file under plain, chunked and batched."""
    plan = plan_request(
        model=str(path),
        engine="llamacpp",
        engine_options=options,
        requests=[RequestSpec(token_ids=list(ids)) for ids in PROMPTS],
        max_new_tokens=8,
        schedules=["plain,chunked,batched"],
    )
    runs = run_check(plan).runs
    share = max(tap.local_bound_share_max or 0.0 for run in runs for tap in run.taps)
    return f"{'/'.join(sorted({str(run.outcome.value) for run in runs}))} {share:.3f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--repack", default="off")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        padded = pad_checkpoint(arguments.model, folder / "padded")
        rows = [
            [
                word,
                *(
                    cell(make_file(padded, word, folder), {**cache, "repack": arguments.repack})
                    for cache in CACHES.values()
                ),
            ]
            for word in arguments.types.split(",")
        ]
    print(tabulate(rows, headers=["type", *CACHES], tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
