"""The routes of the server, and how its errors look."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from reference_engine.engine import LLMEngine
from reference_engine.errors import EngineError
from reference_engine.server.async_engine import AsyncEngine, EngineDeadError, RequestFailedError
from reference_engine.server.chat import answer_chat, chat_params, stream_chat
from reference_engine.server.completions import complete, complete_stream
from reference_engine.server.limits import RequestLimits
from reference_engine.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from reference_engine.server.text import Text

__all__ = ["build_app"]

_STATUSES: dict[type[EngineError], int] = {EngineDeadError: 503, RequestFailedError: 500}
_CLIENT_CLOSED_REQUEST = 499
"""nginx's status for an answer whose client is gone."""


def build_app(engine: LLMEngine, text: Text, *, model: str, api_key: str | None = None) -> FastAPI:
    """Return the server of an engine, as an ASGI application.

    Args:
        engine: belongs to the server as long as it runs; not closed at its end.
        text: of the engine's checkpoint.
        model: name under which the model is served.
        api_key: what clients must send as bearer token; None lets everybody in.
    """
    served = AsyncEngine(engine)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with served:
            yield

    title = f"{model} on the reference engine"
    app = FastAPI(title=title, lifespan=lifespan, dependencies=[Depends(_key_check(api_key))])
    app.add_middleware(RequestLimits)
    _add_errors(app)
    _add_pages(app, served, engine, model)
    _add_tokenizer(app, text, engine)
    _add_completions(app, served, engine, text, model)
    return app


def _add_pages(app: FastAPI, served: AsyncEngine, engine: LLMEngine, model: str) -> None:
    async def health() -> JSONResponse:
        body = {"status": "ok" if served.is_alive else "dead", "num_requests": served.num_requests}
        return JSONResponse(body, status_code=200 if served.is_alive else 503)

    app.add_api_route("/health", health, methods=["GET"])

    async def models() -> dict[str, Any]:
        card = {
            "object": "model",
            "owned_by": "reference_engine",
            "max_model_len": engine.runner.max_model_len,
            "dtype": str(engine.runner.dtype).removeprefix("torch."),
        }
        return {"object": "list", "data": [{"id": name, **card} for name in (model, *engine.runner.adapters)]}

    app.add_api_route("/v1/models", models, methods=["GET"])


def _add_tokenizer(app: FastAPI, text: Text, engine: LLMEngine) -> None:
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        tokens = await asyncio.to_thread(text.encode, request.prompt)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": engine.runner.max_model_len}

    app.add_api_route("/tokenize", tokenize, methods=["POST"])

    async def detokenize(request: DetokenizeRequest) -> dict[str, str]:
        return {"prompt": await asyncio.to_thread(text.decode, request.tokens)}

    app.add_api_route("/detokenize", detokenize, methods=["POST"])


def _add_completions(app: FastAPI, served: AsyncEngine, engine: LLMEngine, text: Text, model: str) -> None:
    async def completions(body: CompletionRequest, request: Request) -> Response:
        body.use_adapter(_adapter(body.model, model, engine))
        prompts = [
            await asyncio.to_thread(text.encode, prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompts
        ]
        if body.stream:
            return await _streamed(request, complete_stream(served, text, body, prompts, body.model or model))
        return await _answered(request, complete(served, text, body, prompts, body.model or model))

    app.add_api_route("/v1/completions", completions, methods=["POST"])

    async def chat(body: ChatRequest, request: Request) -> Response:
        body.use_adapter(_adapter(body.model, model, engine))
        prompt = await asyncio.to_thread(text.encode_chat, body.messages, body.tools)
        params = chat_params(body, room=engine.runner.max_model_len - len(prompt))
        if body.stream:
            return await _streamed(request, stream_chat(served, text, body, prompt, params, body.model or model))
        return await _answered(request, answer_chat(served, text, body, prompt, params, body.model or model))

    app.add_api_route("/v1/chat/completions", chat, methods=["POST"])


def _adapter(name: str | None, served: str, engine: LLMEngine) -> str | None:
    """Return the adapter that a model's name means; None for the base model."""
    if name in (None, served):
        return None
    if name not in engine.runner.adapters:
        known = ", ".join([served, *engine.runner.adapters])
        raise HTTPException(404, f"the model {name!r} is not served here; {known} are")
    return name


async def _answered(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """Return the answer as JSON."""
    answer = await _unless_gone(request, work)
    return Response(status_code=_CLIENT_CLOSED_REQUEST) if answer is None else JSONResponse(answer)


async def _streamed(request: Request, events: AsyncGenerator[dict[str, Any]]) -> Response:
    """Return server-sent events. What is refused before the first event is an error with a status of its own."""
    first = await _unless_gone(request, anext(events))
    if first is None:
        await events.aclose()
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    return StreamingResponse(_lines(first, events), media_type="text/event-stream")


async def _lines(first: dict[str, Any], events: AsyncGenerator[dict[str, Any]]) -> AsyncIterator[str]:
    async with aclosing(events):
        yield _event(first)
        try:
            async for event in events:
                yield _event(event)
        except Exception as error:  # the status is sent already: the error is an event
            cause = _first_cause(error)
            yield _event(_error_body(str(cause), type(cause).__name__, 500))
    yield "data: [DONE]\n\n"


async def _unless_gone(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """Return what the work gives; a client that leaves ends it, and None is returned."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    except ExceptionGroup as group:
        raise _first_cause(group) from group
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait([task, gone])


def _first_cause(error: Exception) -> Exception:
    """Return the first of several failures of the parts of an answer."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _error_body(message: str, kind: str, status: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _error(message: str, kind: str, status: int) -> Response:
    content = json.dumps(_error_body(message, kind, status))  # ASCII: a message may quote what no UTF-8 can say
    return Response(content, status_code=status, media_type="application/json")


def _add_errors(app: FastAPI) -> None:
    async def of_engine(_request: Request, error: EngineError) -> Response:
        return _error(str(error), type(error).__name__, _STATUSES.get(type(error), 400))

    app.add_exception_handler(EngineError, of_engine)

    async def of_body(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return _error(f"{place}: {first['msg']}" if place else first["msg"], "BadRequestError", 400)

    app.add_exception_handler(RequestValidationError, of_body)

    async def of_route(_request: Request, error: HTTPException) -> Response:
        return _error(str(error.detail), "HTTPError", error.status_code)

    app.add_exception_handler(HTTPException, of_route)


def _key_check(api_key: str | None) -> Callable[[Request], None]:
    def check_key(request: Request) -> None:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        is_open = api_key is None or request.url.path == "/health"
        if not is_open and not secrets.compare_digest(key.encode(), str(api_key).encode()):
            raise HTTPException(401, "the API key is missing or wrong")

    return check_key
