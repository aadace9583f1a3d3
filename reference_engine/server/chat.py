"""`POST /v1/chat/completions`: messages in the checkpoint's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from reference_engine.requests.outputs import TokenLogprobs
from reference_engine.requests.sampling import SamplingParams
from reference_engine.server.answer import Answer, merged, usage
from reference_engine.server.async_engine import AsyncEngine
from reference_engine.server.choice import pieces, whole
from reference_engine.server.schema import ChatRequest
from reference_engine.server.text import Text

__all__ = ["answer_chat", "chat_params", "stream_chat"]


def chat_params(request: ChatRequest, *, room: int) -> list[SamplingParams]:
    """Return the engine's parameters of each choice; `room` is how many tokens the model has room for."""
    limit = request.max_completion_tokens or request.max_tokens or max(1, room)
    return [
        request.sampling_params(max_new_tokens=limit, num_logprobs=request.num_logprobs, choice=at)
        for at in range(request.n)
    ]


async def answer_chat(
    engine: AsyncEngine,
    text: Text,
    request: ChatRequest,
    prompt: list[int],
    params: Sequence[SamplingParams],
    model: str,
) -> dict[str, Any]:
    """Return the whole answer."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(whole(engine, text, prompt, sampling)) for sampling in params]
    choices = [
        {
            "index": at,
            "message": {"role": "assistant", "content": piece.text},
            "logprobs": _logprobs(text, request, piece.token_ids, piece.logprobs),
            "finish_reason": piece.finish_reason,
            **({"token_ids": piece.token_ids} if request.return_token_ids else {}),
        }
        for at, piece in enumerate(task.result() for task in tasks)
    ]
    num_new = sum(len(task.result().token_ids) for task in tasks)
    body = {**Answer("chat.completion", "chatcmpl", model).head(), "choices": choices}
    if request.return_token_ids:
        body["prompt_token_ids"] = prompt
    return {**body, "usage": usage(len(prompt), num_new)}


async def stream_chat(
    engine: AsyncEngine,
    text: Text,
    request: ChatRequest,
    prompt: list[int],
    params: Sequence[SamplingParams],
    model: str,
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the events of a stream; the first of each choice has the role and no content."""
    body, num_new = Answer("chat.completion.chunk", "chatcmpl", model), 0
    for at in range(len(params)):
        delta = {"role": "assistant", "content": ""}
        yield {**body.head(), "choices": [{"index": at, "delta": delta, "finish_reason": None}]}
    async with aclosing(merged([pieces(engine, text, prompt, sampling) for sampling in params])) as parts:
        async for at, piece in parts:
            num_new += len(piece.token_ids)
            choice = {
                "index": at,
                "delta": {"content": piece.text},
                "logprobs": _logprobs(text, request, piece.token_ids, piece.logprobs),
                "finish_reason": piece.finish_reason,
                **({"token_ids": piece.token_ids} if request.return_token_ids else {}),
            }
            yield {**body.head(), "choices": [choice]}
    if request.includes_usage:
        yield {**body.head(), "choices": [], "usage": usage(len(prompt), num_new)}


def _logprobs(
    text: Text, request: ChatRequest, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    as_ids = request.return_tokens_as_token_ids
    return {
        "content": [
            {
                **_token(text, token_id, logprob.logprob, as_ids),
                "top_logprobs": [_token(text, *pair, as_ids) for pair in logprob.top],
            }
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        ]
    }


def _token(text: Text, token_id: int, logprob: float, as_ids: bool) -> dict[str, Any]:
    return {
        "token": text.name(token_id, as_ids=as_ids),
        "logprob": logprob,
        "bytes": list(text.token(token_id).encode()),
    }
