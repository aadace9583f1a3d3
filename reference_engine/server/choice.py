"""One choice of an answer: the tokens of one request of the engine, with their text and log probabilities."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from reference_engine.requests.detokenizer import Detokenizer
from reference_engine.requests.outputs import FinishReason, TokenLogprobs
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.stopping import find_stop
from reference_engine.server.async_engine import AsyncEngine
from reference_engine.server.text import Text

__all__ = ["ContinuationPiece", "pieces", "prompt_logprobs", "whole"]

_REASONS = {FinishReason.LENGTH: "length", FinishReason.EOS: "stop", FinishReason.STOP: "stop"}

_CONTEXT_TOKENS = 5
"""Tokens of the prompt that decide how the first new ones are written: with a space before them, or without."""


@dataclass(slots=True, kw_only=True)
class ContinuationPiece:
    """Some tokens of a continuation, one if it is streamed, else all of them."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each token if they were asked for."""
    finish_reason: str | None = None
    """`length` or `stop`; None while there is more to come."""


async def pieces(
    engine: AsyncEngine, text: Text, prompt: Sequence[int], params: SamplingParams
) -> AsyncGenerator[ContinuationPiece]:
    """Yield a continuation token by token; its joined text ends before a stop string.

    Text that may become a stop string is held back until it is known.
    """
    detokenizer = Detokenizer(text.decode, prompt[-_CONTEXT_TOKENS:])
    held, longest = "", max((len(stop) for stop in params.stop), default=1)
    async with aclosing(engine.generate(prompt, params)) as outputs:
        async for output in outputs:
            held += detokenizer.add(output.token_id)
            is_last = output.finish_reason is not None
            if is_last:
                held += detokenizer.finish()
                end = find_stop(held, params.stop)
                ready, held = held if end is None else held[:end], ""
            else:
                at = max(0, len(held) - longest + 1)
                ready, held = held[:at], held[at:]
            yield ContinuationPiece(
                text=ready,
                token_ids=[output.token_id],
                logprobs=[] if output.logprobs is None else [output.logprobs],
                finish_reason=_REASONS[output.finish_reason] if output.finish_reason is not None else None,
            )


async def whole(engine: AsyncEngine, text: Text, prompt: Sequence[int], params: SamplingParams) -> ContinuationPiece:
    """Return a continuation as one piece."""
    joined = ContinuationPiece()
    async with aclosing(pieces(engine, text, prompt, params)) as parts:
        async for part in parts:
            joined.text += part.text
            joined.token_ids += part.token_ids
            joined.logprobs += part.logprobs
            joined.finish_reason = part.finish_reason
    return joined


async def prompt_logprobs(
    engine: AsyncEngine, prompt: Sequence[int], num_logprobs: int, adapter: str | None = None
) -> list[TokenLogprobs | None]:
    """Return what the model makes of each token of a prompt after those before it; None for the first.

    The engine computes logits where a token is chosen, so the prompt is forced, one step a token.
    """
    if len(prompt) == 1:
        return [None]
    params = SamplingParams(
        max_new_tokens=len(prompt) - 1,
        forced_token_ids=prompt[1:],
        num_logprobs=num_logprobs,
        ignore_eos=True,
        adapter=adapter,
    )
    async with aclosing(engine.generate(prompt[:1], params)) as outputs:
        return [None, *[output.logprobs async for output in outputs]]
