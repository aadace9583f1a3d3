"""How a check grows: with tokens, layers, requests and schedules, one after the other, at a small width.

Each row is a check in a process of its own, forked from one that has imported everything: CPU seconds without a golden
and with it, those that the estimate of `--dry-run` gives, the peak of memory beside mapped files above that of the
imports, the rows and the golden on disk. All values are those that the engine records under the first schedule.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.check_growth [--axes tokens layers requests schedules] [--most 2]
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tabulate import tabulate
from transformers import AutoConfig, AutoModelForCausalLM

from harness.base.memory import watched_memory
from harness.extensions.faults.zoo.lively import make_lively
from harness.formats.case import RequestSpec
from harness.judge.jobs import estimate
from harness.judge.jobs.check import run_check
from harness.plan import Plan, plan_request

SCHEDULES = ["plain", "batched", "chunked", "mixed", "prefix-hit", "preempted", "forked", "rewound", "speculative"]
AXES: Mapping[str, tuple[int, ...]] = {
    "tokens": (64, 512, 2048, 8192),
    "layers": (2, 8, 20, 80),
    "requests": (1, 4, 16, 64),
    "schedules": (1, 3, 5, 9),
}
"""Sizes, of which one is varied at a time; the others are the first."""
_MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is checked."""

    tokens: int = 64
    """Of the prompt of each request."""
    layers: int = 2
    requests: int = 1
    schedules: int = 1


FIRST = {"schedules": Size(requests=4)}
"""The other sizes where they are not the least: most schedules need several requests."""


def save(folder: Path, size: Size) -> None:
    """Write a checkpoint of a Qwen3 whose rows are wide enough for sketches."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        vocab_size=1024, num_hidden_layers=size.layers, max_position_embeddings=16384,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    make_lively(model, seed=0)
    model.save_pretrained(folder)


def plan_of(folder: Path, size: Size) -> Plan:
    """Return a check of some random prompts, with four new tokens each."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 1024, (size.requests, size.tokens), generator=generator).tolist()
    return plan_request(
        model=str(folder), engine="reference", dtype="float32", device="cpu", max_new_tokens=4, local_files_only=True,
        requests=[RequestSpec(token_ids=tokens) for tokens in prompts], schedules=list(SCHEDULES[: size.schedules]),
    )  # fmt: skip


def measure(size: Size) -> dict[str, Any]:
    """Return the figures of two checks, the second with the golden of the first, and of an estimate before both."""
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ, HARNESS_CACHE=f"{name}/cache"):
        folder = Path(name)
        save(folder / "model", size)
        plan = plan_of(folder / "model", size)
        with patch.object(estimate, "_clock", time.process_time):
            estimated = estimate.run_estimate(plan)
        with watched_memory() as seen:
            time.sleep(0.1)
            before = max(seen)
            seconds, outcome = timed(lambda: run_check(plan, out=folder / "out").outcome.value)
            peak = max(seen) - before
        values = num_bytes(next((folder / "out").glob("plain*")))
        golden = num_bytes(folder / "cache" / "goldens")
        again, _ = timed(lambda: run_check(plan))
    return {
        "outcome": outcome,
        "first s": seconds,
        "with golden s": again,
        "estimate of the oracle's part s": estimated.seconds,
        "peak MB": peak / _MB,
        "all values MB": values / _MB,
        "golden, % of these": 100 * golden / values,
    }


def timed(check: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and its result."""
    begin = time.process_time()
    result = check()
    return time.process_time() - begin, result


def num_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def in_fork(size: Size) -> dict[str, Any]:
    """Measure in a process of its own."""
    reading, writing = os.pipe()
    if not os.fork():
        os.close(reading)
        status = 1
        try:
            os.write(writing, json.dumps(measure(size)).encode())
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.wait()
    return dict(json.loads(text)) if text else {"outcome": "failed"}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.check_growth")
    parser.add_argument("--axes", nargs="*", choices=AXES, default=list(AXES))
    parser.add_argument("--most", type=int, default=len(max(AXES.values(), key=len)), help="sizes of each axis")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs = [(axis, value) for axis in options.axes for value in AXES[axis][: options.most]]
    sizes = list(dict.fromkeys(replace(FIRST.get(axis, Size()), **{axis: value}) for axis, value in pairs))
    rows = []
    for size in sizes:
        figures = in_fork(size)
        shown = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in figures.items()}
        rows.append({**asdict(size), **shown})
        sys.stderr.write(f"{rows[-1]}\n")
    sys.stdout.write(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True) + "\n")
    sys.exit(any(row["outcome"] == "failed" for row in rows))


if __name__ == "__main__":
    main()
