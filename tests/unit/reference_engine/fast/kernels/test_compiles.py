"""Whether the kernels compile for GPUs that need not be there: the interpreter accepts what the compiler refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

# What compute capability 8.9 gives a program; 8.0 and 9.0 give more.
SHARED_BYTES = 99 << 10


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_compile(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    program = Path(__file__).with_name("compile_kernels.py")
    run = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=False, timeout=1500
    )
    assert run.returncode == 0, run.stderr
    for kernels in json.loads(run.stdout):
        names = [kernel["name"] for kernel in kernels]
        assert Counter(names) == {
            "_decode_kernel": 5, "_merge_kernel": 3, "_prefill_kernel": 3, "_store_kernel": 2,
            "_add_norm_kernel": 2, "_silu_mul_kernel": 1, "_norm_rotate_kernel": 2,
            "_row_product_kernel": 3, "_int8_kernel": 2,
        }  # fmt: skip
        for kernel in kernels:
            assert kernel["shared_bytes"] <= SHARED_BYTES, kernel
            assert kernel["target"] in ("sm_89", "sm_90a")
            if not kernel["is_float32"]:
                assert kernel["spilled_bytes"] == 0, kernel
            if kernel["name"] in ("_decode_kernel", "_prefill_kernel"):
                assert kernel["has_matrix_units"] != kernel["is_float32"], "float32 keeps all of its bits"
            if kernel["name"] == "_int8_kernel":
                assert kernel["has_matrix_units"], "integers are exact there"
            if kernel["name"] == "_decode_kernel":
                assert kernel["copies_ahead"] > 0, "the next keys are loaded while these are computed with"
