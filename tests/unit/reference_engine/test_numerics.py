"""Torch's switches during a step: set, and put back whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.attention import paged
from reference_engine.numerics import step_numerics


def switches() -> tuple[bool, bool, bool]:
    matmul = torch.backends.cuda.matmul
    return (
        torch.backends.cuda.cudnn_sdp_enabled(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_leaves_the_switches_as_they_were(checkpoint: Any, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    before, seen, attend = switches(), [], paged.attend_chunk

    def watched(*args: Any) -> torch.Tensor:
        seen.append(switches())
        if fails:
            raise RuntimeError("in the middle of a step")
        return attend(*args)

    monkeypatch.setattr(paged, "attend_chunk", watched)
    engine = LLMEngine(checkpoint.folder, EngineConfig(max_model_len=32))
    engine.runner._numerics = step_numerics  # what a GPU's steps run in
    engine.add_request([5, 6, 7], SamplingParams(max_new_tokens=1))
    try:
        engine.step()
    except RuntimeError:
        assert fails
    assert set(seen) == {(False, False, False)}
    assert switches() == before == (True, True, True)


def test_on_the_cpu_nothing_is_switched(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, attend = [], paged.attend_chunk
    monkeypatch.setattr(paged, "attend_chunk", lambda *args: seen.append(switches()) or attend(*args))
    LLMEngine(checkpoint.folder, EngineConfig(max_model_len=32)).generate([[5, 6]], SamplingParams(max_new_tokens=1))
    assert set(seen) == {(True, True, True)}
