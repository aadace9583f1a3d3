"""A verdict does not depend on the processor: an engine on other instructions than those its golden was made with.

A golden may come from another machine, and CI from one without AVX-512. `ATEN_CPU_CAPABILITY` and its like take the
instructions away from torch, oneDNN and MKL, which read them once, at the start of a process.
"""

import os
import subprocess
import sys

import pytest

OLDER_CPU = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
MODEL = (
    "--model", "qwen3-tiny", "--schedule", "mixed", "--max-new-tokens", "4",
    "--token-ids", "5,9,6,7,88,3,64,12,31,77,20", "--token-ids", "9,8,7",
)  # fmt: skip
PROGRAM = """
import sys
import torch
from harness.cli.main import run
assert torch.backends.cpu.get_cpu_capability() == "DEFAULT", torch.backends.cpu.get_cpu_capability()
for dtype in ("float32", "bfloat16"):
    assert run(["check", *sys.argv[1:], "--dtype", dtype]) == 0, dtype
assert run(["faults", "--only", "inputs-q8-undeclared"]) == 0
"""


@pytest.mark.slow
def test_checks_on_the_least_instructions_come_to_the_same_verdicts(harness):
    for dtype in ("float32", "bfloat16"):  # the goldens are made with the instructions of this machine
        ran = harness("check", *MODEL, "--dtype", dtype)
        assert ran.status == 0, ran.out + ran.err
    command = [sys.executable, "-c", PROGRAM, *MODEL]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **OLDER_CPU})
    assert ran.returncode == 0, ran.stdout + ran.stderr
