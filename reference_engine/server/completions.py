"""`POST /v1/completions`: plain continuations of text or token ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any

from reference_engine.requests.outputs import TokenLogprobs
from reference_engine.server.answer import Answer, merged, usage
from reference_engine.server.async_engine import AsyncEngine
from reference_engine.server.choice import ContinuationPiece, pieces, prompt_logprobs, whole
from reference_engine.server.schema import CompletionRequest
from reference_engine.server.text import Text

__all__ = ["complete", "complete_stream"]


async def complete(
    engine: AsyncEngine, text: Text, request: CompletionRequest, prompts: list[list[int]], model: str
) -> dict[str, Any]:
    """Return the whole answer; its choices are ordered by prompt."""
    jobs = [_choice(engine, text, request, prompt, at) for prompt in prompts for at in range(request.n)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job) for job in jobs]
    choices = [task.result() for task in tasks]
    num_new = sum(num for _, num in choices)
    body = Answer("text_completion", "cmpl", model)
    return {
        **body.head(),
        "choices": [{"index": at, **choice} for at, (choice, _) in enumerate(choices)],
        "usage": usage(sum(map(len, prompts)), num_new),
    }


async def complete_stream(
    engine: AsyncEngine, text: Text, request: CompletionRequest, prompts: list[list[int]], model: str
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the events of a stream, those of all choices as they come."""
    body, num_new = Answer("text_completion", "cmpl", model), 0
    params = [_params(request, at) for at in range(request.n)]
    sources = [pieces(engine, text, prompt, sampling) for prompt in prompts for sampling in params]
    offsets, started = [0] * len(sources), set[int]()
    async with aclosing(merged(sources)) as parts:
        async for at, piece in parts:
            num_new += len(piece.token_ids)
            choice = {
                "index": at,
                "text": piece.text,
                "logprobs": _logprobs(text, request, piece.token_ids, piece.logprobs, offsets[at]),
                "finish_reason": piece.finish_reason,
            }
            offsets[at] += sum(len(text.token(token_id)) for token_id in piece.token_ids)
            if request.return_token_ids:
                choice["token_ids"] = piece.token_ids
                choice["prompt_token_ids"] = None if at in started else prompts[at // request.n]
                started.add(at)
            yield {**body.head(), "choices": [choice]}
    if request.includes_usage:
        yield {**body.head(), "choices": [], "usage": usage(sum(map(len, prompts)), num_new)}


async def _choice(
    engine: AsyncEngine, text: Text, request: CompletionRequest, prompt: list[int], at: int
) -> tuple[dict[str, Any], int]:
    """Return one choice, and how many tokens are new in it."""
    before, known = [], list[TokenLogprobs | None]()
    if request.echo:
        before = prompt
        if request.logprobs is not None:
            known = await prompt_logprobs(engine, prompt, request.logprobs, request.adapter)
    piece = ContinuationPiece(finish_reason="length")
    if request.max_tokens:
        piece = await whole(engine, text, prompt, _params(request, at))
    logprobs = _logprobs(text, request, [*before, *piece.token_ids], [*known, *piece.logprobs], 0)
    choice: dict[str, Any] = {
        "text": text.decode(before) + piece.text,
        "logprobs": logprobs,
        "finish_reason": piece.finish_reason,
    }
    if request.return_token_ids:
        choice |= {"prompt_token_ids": prompt, "token_ids": piece.token_ids}
    return choice, len(piece.token_ids)


def _params(request: CompletionRequest, at: int) -> Any:
    return request.sampling_params(max_new_tokens=request.max_tokens, num_logprobs=request.logprobs, choice=at)


def _logprobs(
    text: Text,
    request: CompletionRequest,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offset: int,
) -> dict[str, Any] | None:
    """Return OpenAI's four lists; None if none were asked for."""
    if request.logprobs is None:
        return None
    as_ids = request.return_tokens_as_token_ids
    texts = [text.token(token_id) for token_id in token_ids]
    return {
        "tokens": [text.name(token_id, as_ids=as_ids) for token_id in token_ids],
        "token_logprobs": [None if logprob is None else logprob.logprob for logprob in logprobs],
        "top_logprobs": [
            None if logprob is None else {text.name(token, as_ids=as_ids): value for token, value in logprob.top}
            for logprob in logprobs
        ],
        "text_offset": list(accumulate((len(part) for part in texts[:-1]), initial=offset)) if texts else [],
    }
