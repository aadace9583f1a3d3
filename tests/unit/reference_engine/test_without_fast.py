"""The core by itself: what makes the engine fast can be removed, and everything else works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.loader import find_kernels

ROOT = Path(__file__).parents[3]
PLUGIN = "tests.unit.reference_engine.without_fast"
QUICK = ("attention", "block_pool", "closing", "kv_cache", "layers", "scheduler")
GENERATE = f"""
import sys, {PLUGIN}
from reference_engine import EngineConfig, EngineError, LLMEngine, SamplingParams
config = EngineConfig(dtype="float32", max_model_len=64, enable_prefix_caching=True, debug_checks=True)
params = SamplingParams(max_new_tokens=6, ignore_eos=True)
with LLMEngine(sys.argv[1], config) as engine:
    print([output.token_ids for output in engine.generate([list(range(4, 41)), [5, 6, 7]], params)])
try:
    LLMEngine(sys.argv[1], EngineConfig(attention_backend="cpp"))
except EngineError as error:
    print(error)
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, check=False, capture_output=True, text=True, timeout=1200
    )


def test_the_core_generates_the_same_tokens_and_does_not_know_the_other_backends(checkpoint: Any) -> None:
    alone = run("-c", GENERATE, str(checkpoint.folder))
    with LLMEngine(checkpoint.folder, EngineConfig(dtype="float32", max_model_len=64)) as engine:
        params = SamplingParams(max_new_tokens=6, ignore_eos=True)
        expected = [output.token_ids for output in engine.generate([list(range(4, 41)), [5, 6, 7]], params)]
    assert alone.returncode == 0, alone.stderr
    tokens, refusal = alone.stdout.splitlines()
    assert tokens == str(expected)
    assert refusal == (
        "unknown attention backend, in EngineConfig.attention_backend: expected one of paged, contiguous, recompute, "
        "found cpp."
    )


def core_tests_pass(*files: Path) -> None:
    options = ("-m", "pytest", "-n", "0", "-q", "-x", "-p", PLUGIN)
    done = run(*options, *map(str, files))
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
def test_quick_tests_of_the_core_pass() -> None:
    core_tests_pass(*(Path(__file__).with_name(f"test_{name}.py") for name in QUICK))


@pytest.mark.slow
def test_all_tests_of_the_core_pass() -> None:
    core_tests_pass(*sorted(path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)))


def test_what_it_lacks_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reference_engine.fast.huge_pages", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "reference_engine.fast.fast_kernels", raising=False)
    with pytest.raises(ModuleNotFoundError, match="huge_pages"):
        find_kernels()
