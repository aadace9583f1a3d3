"""The backend `cpp`: what it refuses, how it is compiled, and the engine with it against the engine without it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.attention.select import find_backend
from reference_engine.errors import ConfigError, DeviceError
from reference_engine.fast import cpp_operators, packing
from reference_engine.fast.attention import cpp
from reference_engine.fast.cpp_operators import find_compiler
from reference_engine.fast.fast_kernels import FastKernels
from reference_engine.fast.products import FewRows

from ..recorder import Recorder, assert_same_rows
from ..test_kv_cache import make_spec
from .test_fused import observed

BACKENDS = FastKernels.backends

needs_compiler = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
PROMPTS = [list(range(4, 41)), [5, 6, 7], list(range(4, 24)), [44]]
PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)


def refusal(**changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        find_backend("cpp", make_spec(**changes), BACKENDS)
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
    assert find_backend("cpp", make_spec(block_size=3, layer_windows=(None, 7)), BACKENDS) is BACKENDS["cpp"]


def test_the_variable_cxx_names_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -I")
    assert find_compiler() == [sys.executable, "-I"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert find_compiler() == []


def test_without_a_compiler_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_operators, "find_compiler", list)
    with pytest.raises(DeviceError, match=r"^there is no C\+\+ compiler\. Set the variable CXX"):
        cpp_operators._compiled()


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match=r"could not be compiled, in .*: found .*file/reference_engine"):
        cpp_operators._compiled()


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
        assert not engine.runner.kernels.is_fused


@needs_compiler
@pytest.mark.parametrize("limits", [{"block_size": 3, "max_num_batched_tokens": 9}, {}], ids=["chunked", "whole"])
@pytest.mark.parametrize("checkpoint", ["qwen3", "qwen2-sliding", "llama"], indirect=True)
def test_the_engine_chooses_the_same_tokens(checkpoint: Any, limits: dict[str, Any]) -> None:
    config = EngineConfig(dtype="float32", max_model_len=64, enable_prefix_caching=True, debug_checks=True, **limits)
    expected, actual = Recorder(), Recorder()
    paged = LLMEngine(checkpoint.folder, config, observer=expected).generate(PROMPTS, PARAMS)
    engine = LLMEngine(checkpoint.folder, replace(config, attention_backend="cpp"), observer=actual)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert engine.runner.kernels.is_fused
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
    for (name, fused_value), (_, plain_value) in zip(fused, plain, strict=True):
        assert (fused_value.shape, fused_value.dtype) == (plain_value.shape, plain_value.dtype), name
        assert (fused_value.double() - plain_value.double()).norm() <= limit * plain_value.double().norm(), name


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("has_memory", [True, False])
def test_few_rows_are_multiplied_by_plain_weights_and_copies_made_for_more_of_them_in_16_bits(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, has_memory: bool
) -> None:
    monkeypatch.setattr(packing, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(packing, "available_bytes", lambda: has_memory << 40)
    config = EngineConfig(dtype=dtype, attention_backend="cpp", max_model_len=64)
    is_copied = dtype != "float32" and packing._is_served(getattr(torch, dtype))
    with LLMEngine(checkpoint.folder, config) as engine:
        head = engine.runner.model.lm_head
        assert isinstance(head.product, FewRows) is (has_memory or not is_copied)
        assert head.weight_OI.is_mkldnn is (is_copied and not has_memory)
        assert (getattr(head.product, "widened_OI", None) is not None) is (is_copied and has_memory)
        made = [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]
    with LLMEngine(checkpoint.folder, replace(config, attention_backend="paged")) as engine:
        assert made == [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("is_served", [True, False])
@pytest.mark.parametrize("vectors", ["AVX512", "AVX2", "DEFAULT"])
def test_rows_of_the_own_product_by_what_the_cpu_has_instructions_for(
    monkeypatch: pytest.MonkeyPatch, is_served: bool, vectors: str
) -> None:
    monkeypatch.setattr(packing, "_is_served", lambda dtype: is_served)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    assert packing.max_few_rows(torch.float32) == (256 if vectors == "AVX512" else 64)
    for dtype in (torch.bfloat16, torch.float16):
        assert (packing.max_few_rows(dtype) == 1) is is_served
        assert packing.max_few_rows(dtype) >= 1


@needs_compiler
def test_adapters_are_not_served_with_fused_kernels(checkpoint: Any) -> None:
    config = EngineConfig(attention_backend="cpp", max_model_len=32)
    with pytest.raises(ConfigError, match="fused_kernels with the backend cpp"):
        LLMEngine(checkpoint.folder, config, adapters={"a": "nowhere"})
