"""The fused decoder against the plain one: the same taps in the same order, with nearly the same values."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reference_engine import EngineConfig, LLMEngine, SamplingParams, StepInfo
from reference_engine.model import Decoder

from .kernels.launching import DEVICES, IGNORE_NUMPY, launch_on

pytestmark = IGNORE_NUMPY
PROMPTS = [list(range(4, 30)), [5, 6, 7]]
FORCED = SamplingParams(max_new_tokens=3, forced_token_ids=[8, 9], ignore_eos=True)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return launch_on(request.param, monkeypatch)


class Everything:
    """Keeps every tap of every step, in order."""

    def __init__(self) -> None:
        self.taps: list[tuple[str, torch.Tensor]] = []

    def begin_step(self, step: StepInfo) -> None: ...

    def tap(self, name: str, tensor: torch.Tensor) -> None:
        self.taps.append((name, tensor.clone()))

    def end_step(self, sampled: Any) -> None: ...


def observed(folder: Any, config: EngineConfig) -> list[tuple[str, torch.Tensor]]:
    everything = Everything()
    with LLMEngine(folder, config, observer=everything) as engine:
        assert engine.runner.kernels.is_fused is config.fused_kernels
        engine.generate(PROMPTS, FORCED)
    return everything.taps


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("checkpoint", "dtype"),
    list(product(["qwen3", "qwen2-sliding", "llama"], ["float32", "bfloat16"])),
    indirect=["checkpoint"],
)
def test_every_tap_is_there_and_as_it_was(checkpoint: Any, device: torch.device, dtype: str) -> None:
    config = EngineConfig(
        dtype=dtype, device=str(device), attention_backend="triton", max_model_len=64, max_num_batched_tokens=20
    )
    fused = observed(checkpoint.folder, config)
    plain = observed(checkpoint.folder, replace(config, fused_kernels=False))
    assert [name for name, _ in fused] == [name for name, _ in plain]
    assert any(name.endswith("q_norm") for name, _ in fused) == ("qwen3" in str(checkpoint.folder))
    limit = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]  # errors of two layers, of which one rounding is 2e-3
    for (name, fused_value), (_, plain_value) in zip(fused, plain, strict=True):
        assert (fused_value.shape, fused_value.dtype) == (plain_value.shape, plain_value.dtype), name
        assert (fused_value.double() - plain_value.double()).norm() <= limit * plain_value.double().norm(), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoint", ["qwen3", "llama"], indirect=True)
def test_unobserved_steps_make_the_same_tokens(checkpoint: Any, device: torch.device) -> None:
    config = EngineConfig(dtype="float32", device=str(device), attention_backend="triton", max_model_len=64)
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    made = []
    for is_fused in (True, False):
        with LLMEngine(checkpoint.folder, replace(config, fused_kernels=is_fused)) as engine:
            made.append([output.token_ids for output in engine.generate(PROMPTS, params)])
    assert made[0] == made[1]


class Operators(TorchDispatchMode):
    """Counts what is computed, views and empty tensors left out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not func.is_view and name not in ("aten::empty", "aten::new_empty", "aten::split"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_a_layer_is_ten_operators(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_on("cpu", monkeypatch)
    counts = []
    for is_fused in (True, False):
        config = EngineConfig(dtype="bfloat16", attention_backend="triton", max_model_len=32, fused_kernels=is_fused)
        with LLMEngine(checkpoint.folder, config) as engine:
            engine.add_request([5, 6, 7], SamplingParams(max_new_tokens=3, ignore_eos=True))
            engine.step()
            with Operators() as operators:
                engine.step()
        counts.append(operators.counts)
    fused, plain = counts
    counts = {"norm_rotate": 2, "store_kv": 2, "paged_decode": 2, "silu_mul": 2, "add_norm": 4, "rms_norm": 1}
    # Beside the layers: embedding, cosines and sines in seven operators, a norm, the head and the choice.
    assert fused == Counter({f"reference_engine::{name}": count for name, count in counts.items()}) + Counter(
        {"aten::mm": 2 * 4 + 1, "aten::embedding": 1, "aten::_to_copy": 3, "aten::mul": 1, "aten::cat": 1,
         "aten::cos": 1, "aten::sin": 1, "aten::max": 1}
    )  # fmt: skip
    assert plain.total() - fused.total() == 2 * (52 - 10) + 8 - 1, (
        "the last norm is eight operators, the first kernel one"
    )


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize(
    "options",
    [{"fused_kernels": False}, {"compile_layers": True}, {"attention_backend": "paged"}],
    ids=["switched off", "compiled", "no triton"],
)
def test_otherwise_the_decoder_stays_plain(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    launch_on("cpu", monkeypatch)
    config = EngineConfig(**{"attention_backend": "triton", "max_model_len": 32, **options})
    with LLMEngine(checkpoint.folder, config) as engine:
        assert not engine.runner.kernels.is_fused
        decoder = engine.runner._decoder
        assert isinstance(getattr(decoder, "plain", decoder), Decoder)
