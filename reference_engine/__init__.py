"""A small, readable LLM inference engine: paged KV cache with shared prefixes, chunked prefill, continuous batching.

Importing the package costs nothing: torch is loaded when the first name that needs it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference_engine.checkpoint.model_config import ModelConfig
    from reference_engine.config import EngineConfig
    from reference_engine.engine import LLMEngine
    from reference_engine.errors import EngineError
    from reference_engine.observer import Observer, StepInfo
    from reference_engine.requests.outputs import FinishReason, RequestOutput, TokenLogprobs, TokenOutput
    from reference_engine.requests.sampling import SamplingParams

__all__ = [
    "EngineConfig",
    "EngineError",
    "FinishReason",
    "LLMEngine",
    "ModelConfig",
    "Observer",
    "RequestOutput",
    "SamplingParams",
    "StepInfo",
    "TokenLogprobs",
    "TokenOutput",
]

_HOMES = {
    "EngineConfig": "config",
    "EngineError": "errors",
    "FinishReason": "requests.outputs",
    "LLMEngine": "engine",
    "ModelConfig": "checkpoint.model_config",
    "Observer": "observer",
    "RequestOutput": "requests.outputs",
    "SamplingParams": "requests.sampling",
    "StepInfo": "observer",
    "TokenLogprobs": "requests.outputs",
    "TokenOutput": "requests.outputs",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
