"""vLLM's model runner without a table of its tensors: every tap is found, of layers with windows too."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "adapters" / "vllm"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_every_tap_is_found_by_content(family, families):
    program = f"""
from pathlib import Path
import harness
from by_content import open_engine

folder = Path({str(families[family])!r})
engine = open_engine(folder, dtype="float32", device="cpu", options={{}})
prompts = [list(range(3, 50)), list(range(60, 71))]
schedules = ["plain", "chunked:7", "batched", "mixed"]
report = harness.check(engine, model=folder, dtype="float32", prompts=prompts, max_new_tokens=4, schedules=schedules)
for run in report.runs:
    print("RUN", run.outcome, run.coverage.missing, run.coverage.not_offered, run.coverage.judged_compute)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=FOLDER)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RUN")]
    assert lines == ["RUN pass 0 () 1.0"] * 4, done.stdout + done.stderr
