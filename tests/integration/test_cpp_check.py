"""The backend in C++ against the oracle, under every schedule that shares out rows differently."""

from pathlib import Path
from typing import Any

import pytest

from reference_engine.fast.cpp_operators import find_compiler

pytestmark = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
TOKENS = ",".join(map(str, range(10, 47)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["plain", "mixed", "prefix-hit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_row_is_that_of_the_oracle(harness: Any, checkpoints: Path, dtype: str, schedule: str) -> None:
    ran = harness(
        "check", "--model", checkpoints / "qwen3-tiny", "--token-ids", TOKENS, "--token-ids", "5,6,7",
        "--dtype", dtype, "--engine-option", "attention_backend=cpp", "--max-new-tokens", "3",
        "--schedule", schedule, "--format", "json",
    )  # fmt: skip
    assert (ran.status, ran.json["verdict"]) == (0, "pass"), ran.out[-2000:]
    assert ran.json["coverage"]["missing"] == 0
