"""The engine in a thread of its own, for the coroutines of an event loop.

`LLMEngine` knows no threads, so one thread alone touches it: between two steps it takes new requests and drops those
whose reader has gone. That is continuous batching over all clients.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any

from reference_engine.engine import LLMEngine
from reference_engine.errors import EngineError, RequestError
from reference_engine.outputs import TokenOutput
from reference_engine.sampling import SamplingParams

__all__ = ["AsyncEngine", "EngineDeadError"]

Event = TokenOutput | Exception


class EngineDeadError(EngineError):
    """A step of the engine failed, and no request can be served any more."""


class AsyncEngine:
    """Runs an engine that no other code may use; used as an asynchronous context manager.

    `engine` stays open at the end of the block: its opener owns it.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._readers: dict[int, asyncio.Queue[Event]] = {}
        """By request; written by the thread, each read by one coroutine."""
        self._error: Exception | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        return self._error is None and self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """Requests that are waiting or running."""
        return len(self._readers)

    async def __aenter__(self) -> AsyncEngine:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_stopping = True
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> AsyncGenerator[TokenOutput]:
        """Yield the tokens of a request as they come. Whoever stops reading aborts the request.

        Raises:
            RequestError, CapacityError, ConfigError: as `LLMEngine.add_request`, before anything is yielded.
            EngineDeadError: a step failed.
        """
        reader: asyncio.Queue[Event] = asyncio.Queue()
        request_id = await self._call(lambda: self._add(prompt, params, reader))
        try:
            while True:
                event = await reader.get()
                if isinstance(event, Exception):
                    raise _dead(event) from event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self._commands.put(lambda: self._abort(request_id))

    async def _call(self, function: Callable[[], int]) -> int:
        """Run a function in the engine's thread, between two steps, and return its result."""
        assert self._loop is not None, "AsyncEngine is used in `async with`"
        done: asyncio.Future[int] = self._loop.create_future()

        def run() -> None:
            try:
                result, error = function(), None
            except Exception as caught:
                result, error = -1, caught
            self._in_loop(_resolve, done, result, error)

        self._commands.put(run)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:  # it may be added still: take it away then
            done.add_done_callback(self._abort_unread)
            raise

    def _abort_unread(self, done: asyncio.Future[int]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._commands.put(lambda: self._abort(done.result()))

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        while not self._is_stopping:
            self._take_commands()
            if self._has_work:
                try:
                    self._deliver(self._engine.step())
                except Exception as error:
                    self._fail(error)

    @property
    def _has_work(self) -> bool:
        return self._error is None and self._engine.has_unfinished()

    def _take_commands(self) -> None:
        """Run what was asked for; where there is nothing to compute, wait for the first."""
        if not self._has_work:
            self._commands.get()()
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _fail(self, error: Exception) -> None:
        self._error = error
        for reader in self._readers.values():
            self._in_loop(reader.put_nowait, error)
        self._readers.clear()

    def _add(self, prompt: Sequence[int], params: SamplingParams, reader: asyncio.Queue[Event]) -> int:
        if self._error is not None:
            raise _dead(self._error)
        request_id = self._engine.add_request(prompt, params)
        self._readers[request_id] = reader
        return request_id

    def _abort(self, request_id: int) -> None:
        if self._readers.pop(request_id, None) is not None:
            with suppress(RequestError):  # it has finished
                self._engine.abort(request_id)

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            reader = self._readers[output.request_id]
            if output.finish_reason is not None:
                del self._readers[output.request_id]
            self._in_loop(reader.put_nowait, output)

    def _in_loop(self, function: Callable[..., Any], *arguments: Any) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: there are no readers any more
            self._loop.call_soon_threadsafe(function, *arguments)


def _dead(error: Exception) -> EngineDeadError:
    return EngineDeadError(f"the engine failed: {type(error).__name__}: {error}")


def _resolve(done: asyncio.Future[int], result: int, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
