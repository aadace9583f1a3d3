"""All layers in one call: the same bits as the kernels one by one, in the steps that it serves and in no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.batch import Batch
from reference_engine.fast import fused
from reference_engine.fast.cpp_operators import find_compiler
from reference_engine.fast.fused import FusedDecoder
from reference_engine.fast.layer_loop import LayerLoop

from ..recorder import Recorder

pytestmark = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
PROMPTS = [list(range(4, 41)), [5, 6, 7], list(range(4, 24)), [44]]
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Compute every step both ways; rows of each, and whether the loop served it."""
    steps: list[tuple[int, bool]] = []
    decode_layers = FusedDecoder._decode_layers

    def both(self: FusedDecoder, x_TD: torch.Tensor, rotation: Any, batch: Batch) -> torch.Tensor:
        assert self.loop is not None
        is_served = self.loop.serves(batch)
        steps.append((len(x_TD), is_served))
        if is_served:
            plain_TD = decode_layers(replace(self, loop=None), x_TD, rotation, batch)
            assert torch.equal(self.loop(x_TD, rotation, batch), plain_TD)
        return decode_layers(self, x_TD, rotation, batch)

    monkeypatch.setattr(fused.FusedDecoder, "_decode_layers", both)
    return steps


def engine_of(checkpoint: Any, **changes: Any) -> LLMEngine:
    config = EngineConfig(**{"dtype": "float32", "max_model_len": 64, "attention_backend": "cpp", **changes})
    return LLMEngine(checkpoint.folder, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("checkpoint", ["qwen3", "qwen2-sliding", "llama"], indirect=True)
def test_every_step_of_single_rows_has_the_same_bits(
    checkpoint: Any, steps: list[tuple[int, bool]], dtype: str
) -> None:
    """Norms of queries and keys, biases and windows, for one request and for several."""
    for prompts in (PROMPTS, PROMPTS[:1]):
        engine = engine_of(checkpoint, dtype=dtype)
        engine.generate(prompts, PARAMS)
    wanted = {1, 4} if engine.runner._decoder.loop.max_rows >= 4 else {1}  # in 16 bits by the CPU's instructions
    assert {rows for rows, is_served in steps if is_served} == wanted
    assert all(is_served == (rows in wanted) for rows, is_served in steps)


def test_tokens_are_those_of_the_calls_one_by_one(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    together = engine_of(checkpoint).generate(PROMPTS, PARAMS)
    monkeypatch.setattr(LayerLoop, "of", classmethod(lambda *_args: None))
    apart = engine_of(checkpoint).generate(PROMPTS, PARAMS)
    assert [item.token_ids for item in together] == [item.token_ids for item in apart]


def test_a_step_that_is_observed_is_not_served(checkpoint: Any, steps: list[tuple[int, bool]]) -> None:
    config = EngineConfig(dtype="float32", max_model_len=64, attention_backend="cpp")
    LLMEngine(checkpoint.folder, config, observer=Recorder()).generate(PROMPTS, PARAMS)
    assert len(steps) > 5
    assert not any(is_served for _, is_served in steps)


def test_chunks_beside_decode_are_not_served(checkpoint: Any, steps: list[tuple[int, bool]]) -> None:
    engine_of(checkpoint, max_num_batched_tokens=9).generate(PROMPTS, PARAMS)
    assert [is_served for rows, is_served in steps if rows > 4] == [False] * sum(rows > 4 for rows, _ in steps)
    assert any(is_served for _, is_served in steps)


def test_more_rows_than_the_kernel_is_for_are_not_served(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[int] = []
    call = LayerLoop.__call__

    def noted(self: LayerLoop, x_TD: torch.Tensor, *rest: Any) -> torch.Tensor:
        served.append(len(x_TD))
        return call(self, x_TD, *rest)

    monkeypatch.setattr(LayerLoop, "__call__", noted)
    of = LayerLoop.of
    monkeypatch.setattr(
        LayerLoop, "of", classmethod(lambda _cls, *args: (loop := of(*args)) and replace(loop, max_rows=2))
    )
    engine_of(checkpoint).generate(PROMPTS, [replace(PARAMS, max_new_tokens=2 + at) for at in range(4)])
    assert set(served) <= {1, 2}
    assert served


def test_layers_with_other_epsilons_have_no_loop(checkpoint: Any) -> None:
    decoder = engine_of(checkpoint).runner._decoder
    assert isinstance(decoder, FusedDecoder)
    norm = decoder.decoder.norm
    assert LayerLoop.of(decoder.layers, norm, decoder.operators) is not None
    assert LayerLoop.of(decoder.layers, replace(norm, eps=2 * norm.eps), decoder.operators) is None
    first = replace(decoder.layers[0], post_attention_layernorm=replace(norm, eps=2 * norm.eps))
    assert LayerLoop.of([first, *decoder.layers[1:]], norm, decoder.operators) is None
    assert LayerLoop.of(decoder.layers, norm, object()) is None, "the kernels of a GPU have no such operator"
