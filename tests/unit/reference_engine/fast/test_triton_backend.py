"""The backend `triton`: what it refuses, and the engine with it against the engine without it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.attention.select import find_backend
from reference_engine.errors import ConfigError
from reference_engine.fast import products
from reference_engine.fast.attention import cpp
from reference_engine.fast.attention import triton as triton_backend
from reference_engine.fast.fast_kernels import FastKernels
from reference_engine.fast.products import FewRows

from ..recorder import Recorder, assert_same_rows
from ..test_kv_cache import make_spec
from .kernels.launching import DEVICES, IGNORE_NUMPY, launch_on

BACKENDS = FastKernels.backends

pytestmark = IGNORE_NUMPY
CUDA = torch.device("cuda")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return launch_on(request.param, monkeypatch)


@pytest.fixture
def _has_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def refusal(**changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        find_backend("triton", make_spec(**changes), BACKENDS)
    return str(caught.value)


def test_without_triton_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: None)
    monkeypatch.setattr(cpp, "find_compiler", list)
    assert refusal() == (
        "the attention backend triton does not serve this, in EngineConfig.attention_backend: expected the package "
        "triton (pip install triton), found no such package. Backends that do: paged, contiguous, recompute."
    )


@pytest.mark.usefixtures("_has_triton")
def test_on_the_cpu_the_error_names_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "expected device cuda, or the environment variable TRITON_INTERPRET=1, found cpu." in refusal()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert find_backend("triton", make_spec(), BACKENDS) is BACKENDS["triton"]


@pytest.mark.usefixtures("_has_triton")
def test_wide_heads_and_other_dtypes_are_refused() -> None:
    assert "expected head_dim at most 256, found 320." in refusal(head_dim=320, device=CUDA)
    assert "expected dtype float32 or bfloat16 or float16, found float64." in refusal(dtype=torch.float64, device=CUDA)


@pytest.mark.usefixtures("_has_triton")
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_any_block_size_and_window_is_served(block_size: int) -> None:
    spec = make_spec(block_size=block_size, layer_windows=(None, 7), device=CUDA)
    assert find_backend("triton", spec, BACKENDS) is BACKENDS["triton"]


def test_no_kernel_is_imported_before_the_backend_is_chosen() -> None:
    code = "import sys, reference_engine.engine; sys.exit('reference_engine.fast.kernels.interpreter' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=600).returncode == 0


def test_the_prefill_kernel_gets_no_single_rows(device: torch.device) -> None:
    backend = BACKENDS["triton"](make_spec(device=device))
    batch: Any = SimpleNamespace(num_single=2, query_lens=[1, 1, 4], context_lens=[5, 9, 7])
    assert backend.plan(batch).tiles_M4.tolist() == [[2, 2, 4, 3]]
    batch = SimpleNamespace(num_single=1, query_lens=[1], context_lens=[5])
    assert backend.plan(batch).tiles_M4.shape == (0, 4)


LIMITS: list[dict[str, Any]] = [
    {"block_size": 3, "max_num_batched_tokens": 9},
    {"block_size": 16},
]
PROMPTS = [list(range(4, 41)), [5, 6, 7], list(range(4, 24)), [44]]
PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("checkpoint", "limits"), list(product(["qwen3", "qwen2-sliding"], LIMITS)), indirect=["checkpoint"]
)
def test_the_engine_chooses_the_same_tokens(checkpoint: Any, device: torch.device, limits: dict[str, Any]) -> None:
    config = EngineConfig(
        dtype="float32", device=str(device), max_model_len=64, enable_prefix_caching=True, debug_checks=True, **limits
    )
    expected, actual = Recorder(), Recorder()
    paged = LLMEngine(checkpoint.folder, config, observer=expected).generate(PROMPTS, PARAMS)
    engine = LLMEngine(checkpoint.folder, replace(config, attention_backend="triton"), observer=actual)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in paged]
    for output in outputs:
        assert_same_rows(output.request_id, actual, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near(checkpoint: Any, device: torch.device, dtype: str) -> None:
    forced = SamplingParams(max_new_tokens=3, forced_token_ids=[5, 9])
    config = EngineConfig(dtype=dtype, device=str(device), attention_backend="triton", max_model_len=64)
    recorder = Recorder()
    (output,) = LLMEngine(checkpoint.folder, config, observer=recorder).generate([PROMPTS[2]], forced)
    expected = checkpoint.logits([*PROMPTS[2], 5, 9])[len(PROMPTS[2]) - 1 :].double()
    logits = recorder.rows("lm_head", output.request_id)
    assert logits.dtype == getattr(torch, dtype)
    error = (logits.double().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < {"bfloat16": 0.05, "float16": 0.01}[dtype]


def test_one_row_of_a_large_weight_is_for_the_kernel(
    checkpoint: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(dtype="float32", device=str(device), max_model_len=32, max_num_seqs=2, cuda_graphs=False)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with LLMEngine(checkpoint.folder, config) as engine:
        expected = engine.generate([[4, 5, 6]], params)
    for least, is_expected in ((1, True), (1 << 30, False)):
        monkeypatch.setattr(products, "MIN_ROW_ELEMENTS", least)
        with LLMEngine(checkpoint.folder, replace(config, attention_backend="triton")) as engine:
            assert isinstance(engine.runner.model.lm_head.product, FewRows) is is_expected
            assert [item.token_ids for item in engine.generate([[4, 5, 6]], params)] == [
                item.token_ids for item in expected
            ]


@pytest.mark.parametrize(("capability", "is_served"), [((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_e4m3_is_refused_such_a_cache(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_served: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    cuda = make_spec(device=torch.device("cuda"), dtype=torch.bfloat16)
    kept = replace(cuda, stored_dtype=torch.float8_e4m3fn)
    refusals = [what for what, _ in triton_backend.TritonAttention.limits.refusals(kept)]
    assert ("compute capability 8.9 for a cache in float8_e4m3fn" in refusals) is not is_served
    for spec in (cuda, replace(cuda, stored_dtype=torch.float8_e5m2)):
        assert not any("capability" in what for what, _ in triton_backend.TritonAttention.limits.refusals(spec))
