"""The backend `cpp`: what it refuses, how it is compiled, and the engine with it against the engine without it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_engine import EngineConfig, LLMEngine, SamplingParams, cpp_operators, packing
from reference_engine.attention import cpp
from reference_engine.attention.backend import BACKENDS, find_backend
from reference_engine.cpp_operators import find_compiler, has_bfloat16_products
from reference_engine.errors import ConfigError, DeviceError

from .recorder import Recorder, assert_same_rows
from .test_fused import observed
from .test_kv_cache import make_spec

needs_compiler = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
PROMPTS = [list(range(4, 41)), [5, 6, 7], list(range(4, 24)), [44]]
PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)


def refusal(**changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        find_backend("cpp", make_spec(**changes))
    return str(caught.value)


def test_without_a_compiler_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "find_compiler", list)
    assert refusal() == (
        "the attention backend cpp does not serve this, in EngineConfig.attention_backend: expected a C++ compiler "
        "(c++, g++, clang++ or the variable CXX), found none. Backends that do: paged, contiguous, recompute."
    )


@needs_compiler
def test_a_gpu_is_refused_and_any_block_size_and_window_served() -> None:
    assert "expected device cpu, found cuda." in refusal(device=torch.device("cuda"))
    assert find_backend("cpp", make_spec(block_size=3, layer_windows=(None, 7))) is BACKENDS["cpp"]


def test_the_variable_cxx_names_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -I")
    assert find_compiler() == [sys.executable, "-I"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert find_compiler() == []


def test_a_compiler_that_fails_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} --no-such-option")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        DeviceError, match=r"could not be compiled, in .*: found (.|\n)*no-such-option(.|\n)*Set the variable CXX"
    ):
        cpp_operators._compiled()
    assert list((tmp_path / "reference_engine").iterdir()) == []


def test_it_is_compiled_once_for_the_same_source_and_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def run(command: list[str], **options: Any) -> None:
        calls.append(command)
        Path(command[-1]).touch()

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    first = cpp_operators._compiled()
    assert first.parent == tmp_path / "reference_engine"
    assert (cpp_operators._compiled(), len(calls)) == (first, 1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert cpp_operators._compiled() != first
    assert len(calls) == 2
    assert not any(option.startswith("-mavx") for option in calls[1])


def test_nothing_is_compiled_before_the_backend_is_chosen(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "load_operators", lambda: pytest.fail("loaded"))
    with LLMEngine(checkpoint.folder, EngineConfig(max_model_len=32)) as engine:
        assert not engine.runner.is_fused


@needs_compiler
@pytest.mark.parametrize("limits", [{"block_size": 3, "max_num_batched_tokens": 9}, {}], ids=["chunked", "whole"])
@pytest.mark.parametrize("checkpoint", ["qwen3", "qwen2-sliding", "llama"], indirect=True)
def test_the_engine_chooses_the_same_tokens(checkpoint: Any, limits: dict[str, Any]) -> None:
    config = EngineConfig(dtype="float32", max_model_len=64, enable_prefix_caching=True, debug_checks=True, **limits)
    expected, actual = Recorder(), Recorder()
    paged = LLMEngine(checkpoint.folder, config, observer=expected).generate(PROMPTS, PARAMS)
    engine = LLMEngine(checkpoint.folder, replace(config, attention_backend="cpp"), observer=actual)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert engine.runner.is_fused
    assert [output.token_ids for output in outputs] == [output.token_ids for output in paged]
    for output in outputs:
        assert_same_rows(output.request_id, actual, expected)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("checkpoint", ["qwen3", "qwen2-sliding", "llama"], indirect=True)
def test_every_tap_is_there_and_as_it_was(checkpoint: Any, dtype: str) -> None:
    config = EngineConfig(dtype=dtype, attention_backend="cpp", max_model_len=64, max_num_batched_tokens=20)
    fused, plain = (observed(checkpoint.folder, replace(config, fused_kernels=is_on)) for is_on in (True, False))
    assert [name for name, _ in fused] == [name for name, _ in plain]
    limit = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype]  # errors of two layers
    for (name, own), (_, other) in zip(fused, plain, strict=True):
        assert (own.shape, own.dtype) == (other.shape, other.dtype), name
        assert (own.double() - other.double()).norm() <= limit * other.double().norm(), name


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "reads_plain"), [("float32", True), ("bfloat16", has_bfloat16_products()), ("float16", False)]
)
def test_products_of_one_row_read_plain_weights_where_memory_holds_two_copies(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, reads_plain: bool
) -> None:
    monkeypatch.setattr(packing, "MIN_ELEMENTS", 1)
    config = EngineConfig(dtype=dtype, attention_backend="cpp", max_model_len=64)
    made = []
    for num_bytes in (1 << 40, 0):
        monkeypatch.setattr(packing, "available_bytes", lambda num_bytes=num_bytes: num_bytes)
        with LLMEngine(checkpoint.folder, config) as engine:
            head = engine.runner.model.lm_head
            assert (head.row_product is not None) is (reads_plain and num_bytes > 0)
            assert head.weight_OI.is_mkldnn is (packing._is_served(head.weight_OI.dtype) and head.row_product is None)
            made.append([output.token_ids for output in engine.generate([PROMPTS[0]], PARAMS)])
    assert made[0] == made[1]


@needs_compiler
def test_adapters_are_not_served_with_fused_kernels(checkpoint: Any) -> None:
    config = EngineConfig(attention_backend="cpp", max_model_len=32)
    with pytest.raises(ConfigError, match="fused_kernels with the backend cpp"):
        LLMEngine(checkpoint.folder, config, adapters={"a": "nowhere"})
