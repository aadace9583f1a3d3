"""The Triton backend against the oracle, on the CPU through Triton's interpreter."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

TOKENS = ",".join(map(str, range(10, 44)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_row_of_the_triton_backend_is_that_of_the_oracle(checkpoints: Path, dtype: str) -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("triton before 3.7 cannot interpret loops under numpy 2.4 (triton#9171)")
    done = subprocess.run(
        [sys.executable, "-c", "from harness.cli import main; main()", "check",
         "--model", str(checkpoints / "qwen3-tiny"), "--token-ids", TOKENS, "--token-ids", "5,6,7",
         "--dtype", dtype, "--engine-option", "attention_backend=triton", "--max-new-tokens", "3",
         "--schedule", "mixed", "--format", "json"],
        capture_output=True, text=True, check=False, timeout=300, env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert result.get("verdict") == "pass", done.stdout[-2000:] + done.stderr[-2000:]
    assert done.returncode == 0
    assert result["coverage"]["missing"] == 0
