from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen2Config

from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.checkpoint.config_file import ConfigFields
from reference_engine.checkpoint.families import FAMILIES
from reference_engine.checkpoint.sliding_window import layer_windows
from reference_engine.errors import ConfigError, EngineError, UnsupportedModelError


def windows_of(family: str, **values: object) -> tuple[int | None, ...]:
    return layer_windows(ConfigFields({"num_hidden_layers": 3, **values}, "config.json"), FAMILIES[family])


def test_mistral_slides_everywhere_or_nowhere() -> None:
    assert windows_of("mistral", sliding_window=8) == (8, 8, 8)
    assert windows_of("mistral", sliding_window=None) == (None, None, None)
    assert windows_of("mistral") == (4096, 4096, 4096)


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_qwen_slides_from_a_layer_on_as_in_transformers(first: int) -> None:
    values = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": first}
    layer_types = Qwen2Config(num_hidden_layers=3, **values).layer_types
    expected = tuple(8 if layer_type == "sliding_attention" else None for layer_type in layer_types)
    assert windows_of("qwen2", **values) == expected
    assert windows_of("qwen2", **{**values, "use_sliding_window": False}) == (None, None, None)
    assert windows_of("qwen2", **values, layer_types=layer_types) == expected


@pytest.mark.parametrize(
    ("family", "values", "error", "message"),
    [
        ("llama", {"layer_types": ["sliding_attention"] * 3}, UnsupportedModelError, "full_attention in every layer"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, ConfigError, "layers slide without a window"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, UnsupportedModelError, "found .*chunked_attention"),
        ("qwen2", {"layer_types": "full_attention"}, UnsupportedModelError, "unsupported layer_types"),
        ("qwen2", {"layer_types": ["full_attention"]}, ConfigError, "expected 3, found 1"),
        ("mistral", {"sliding_window": 0}, ConfigError, "sliding_window is impossible.*found 0"),
        ("mistral", {"sliding_window": "8"}, ConfigError, "found '8'"),
    ],
)
def test_a_contradiction_is_named(family: str, values: dict[str, Any], error: type[EngineError], message: str) -> None:
    with pytest.raises(error, match=message):
        windows_of(family, **values)


@pytest.mark.parametrize("checkpoint", ["mistral", "qwen2-sliding", "gemma3"], indirect=True)
def test_the_window_edge_across_blocks_caches_and_forks(checkpoint: Any) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    prompts = [[5 + i % 40 for i in range(length)] for length in (1, 4, 7, 8, 9, 20)]
    config = EngineConfig(block_size=3, num_blocks=80, enable_prefix_caching=True, debug_checks=True)
    engine = LLMEngine(checkpoint.folder, config)
    expected = [tuple(checkpoint.greedy(prompt, 12)) for prompt in prompts]
    for _ in range(2):
        assert [output.token_ids for output in engine.generate(prompts, params)] == expected
