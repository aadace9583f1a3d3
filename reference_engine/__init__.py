"""A small, readable LLM inference engine: paged KV cache with shared prefixes, chunked prefill, continuous batching.

The core is read in one sitting, in this order:

1. `engine`: requests in, tokens out, a step at a time;
2. `requests.sequence`: the state of one request, and the chunk of it that a step computes;
3. `scheduler`, `block_manager`, `block_pool`, `prefix_cache`: who computes what next, and where its K and V lie;
4. `model_runner`, `batch`: one step, from chunks to tensors to tokens;
5. `model`, `layers`, `rotary`: the decoder;
6. `attention.paged`, `kv_cache`: attention through block tables;
7. `sampler`: the next tokens.

What can be read later, or left out:

- of requests: `control` (fork, rewind, suspend), `speculation` (drafts), `in_flight` (two steps at once), `requests`
  (limits, parameters, text), `scores` (penalties, log probabilities);
- of the model: `loader` (a checkpoint on its device), `checkpoint`, `families` (layers of few families, how a decoder
  is built), `lora`, `rope_types`, `cache_spec`;
- of attention: `attention.backend` (the interface), `attention.sdpa` (the call of torch's kernel), the other backends;
- `tensor_parallel` and `parallel` (several processes), `kernels` and `fast` (kernels, packed weights, recorded steps):
  the first of each is all that the core knows of the second, and it runs without;
- `hooks` (observers, checks of the cache), `server`, `launch` and `cli` (the command line).

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
