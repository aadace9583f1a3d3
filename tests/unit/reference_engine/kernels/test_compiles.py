"""Whether the kernels compile for GPUs that need not be there: the interpreter accepts what the compiler refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# What compute capability 8.9 gives a program; 8.0 and 9.0 give more.
SHARED_BYTES = 99 << 10


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("capability", "dtype", "head_dim"), [(90, "bfloat16", 128), (89, "float32", 80)])
def test_the_kernels_compile(capability: int, dtype: str, head_dim: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    program = Path(__file__).with_name("compile_kernels.py")
    run = subprocess.run(
        [sys.executable, program, str(capability), dtype, str(head_dim)],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    kernels = json.loads(run.stdout)
    names = [kernel["name"] for kernel in kernels]
    assert sorted(names) == ["_decode_kernel"] * 4 + ["_merge_kernel"] * 2 + ["_prefill_kernel"] * 2 + ["_store_kernel"]
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES, kernel
        if kernel["name"] in ("_decode_kernel", "_prefill_kernel"):
            assert kernel["has_matrix_units"] == (dtype == "bfloat16"), "float32 keeps all of its bits"
