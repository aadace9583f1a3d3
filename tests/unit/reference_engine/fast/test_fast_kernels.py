"""The engine with what makes it fast: the weights that it keeps, what it compiles, and what it gives back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_engine import EngineConfig, EngineError, LLMEngine, SamplingParams
from reference_engine.fast import packing
from reference_engine.fast.cpp_operators import find_compiler
from reference_engine.fast.fused import is_fusable
from reference_engine.fast.graphs import is_capturable
from reference_engine.fast.products import Widened

from ...lora_adapter import FOLDER, write_adapter
from ..test_closing import assert_freed_at_once
from .test_graphs import again


@pytest.mark.parametrize("wanted", [None, True, False])
def test_weights_are_widened_where_that_is_wanted_or_memory_allows(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, wanted: bool | None
) -> None:
    monkeypatch.setattr(packing, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(packing, "_is_served", lambda dtype: dtype == torch.float32)
    config = EngineConfig(dtype="bfloat16", max_model_len=32, widen_weights=wanted)
    for num_bytes, is_expected in ((1 << 40, wanted is not False), (0, wanted is True)):
        monkeypatch.setattr(packing, "available_bytes", lambda num_bytes=num_bytes: num_bytes)
        with LLMEngine(checkpoint.folder, config) as engine:
            assert isinstance(engine.runner.model.lm_head.product, Widened) is is_expected
            engine.generate([[4, 5, 6]], SamplingParams(max_new_tokens=2))


@pytest.mark.slow
@pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_layers_make_the_same_tokens(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_ELEMENTS", 1)  # all weights are packed where nothing is compiled
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    prompts = [list(range(4, 20)), [5, 6, 7]]
    config = EngineConfig(dtype="float32", max_model_len=32)
    expected = LLMEngine(checkpoint.folder, config).generate(prompts, params)
    compiled = LLMEngine(checkpoint.folder, replace(config, compile_layers=True)).generate(prompts, params)
    assert [output.token_ids for output in compiled] == [output.token_ids for output in expected]


@pytest.mark.usefixtures("_no_collector")
def test_recorded_steps_are_freed_with_the_engine_at_once(checkpoint: Any) -> None:
    config = EngineConfig(max_model_len=32, max_num_seqs=2)
    assert_freed_at_once(checkpoint.folder, config, lambda engine: engine.runner.kernels.record(engine.backend, again))


@pytest.mark.parametrize(
    ("checkpoint", "can_be_fused", "can_be_recorded"),
    [("qwen3", True, True), ("llama", True, True), ("gemma3", False, True), ("qwen3-moe", False, False)],
    indirect=["checkpoint"],
)
def test_what_can_be_fused_and_recorded_is_read_off_the_layers(
    checkpoint: Any, can_be_fused: bool, can_be_recorded: bool
) -> None:
    with LLMEngine(checkpoint.folder, EngineConfig(max_model_len=32)) as engine:
        decoder = engine.runner.model
        assert (is_fusable(decoder), is_capturable(decoder)) == (can_be_fused, can_be_recorded)
        assert not is_capturable(replace(decoder, lm_head=lambda rows: decoder.lm_head(rows))), "joined over ranks"


def test_what_would_leave_the_adapter_out_is_refused(tmp_path: Path) -> None:
    adapters = {"own": write_adapter(tmp_path / "adapter", seed=3)}
    with pytest.raises(EngineError, match="compile_layers"):
        LLMEngine(FOLDER, EngineConfig(compile_layers=True), adapters=adapters)
