"""The engine in a thread of its own, for the coroutines of an event loop.

`LLMEngine` knows no threads, so one thread alone touches it: between two steps it takes new requests and drops those
whose reader has gone. That is continuous batching over all clients.

A step that fails ends the request that it fails for, and no other: each request of the step is tried alone, the one
that fails again gets the error, and the others go on. Where not even the plainest request can be computed, the engine
is dead.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reference_engine.engine import LLMEngine
from reference_engine.errors import EngineError, RequestError
from reference_engine.requests.outputs import TokenOutput
from reference_engine.requests.sampling import SamplingParams

__all__ = ["AsyncEngine", "EngineDeadError", "RequestFailedError"]

Event = TokenOutput | EngineError


class EngineDeadError(EngineError):
    """A step of the engine failed, and no request can be served any more."""


class RequestFailedError(EngineError):
    """A step of the engine fails with this request, and with this request alone."""


@dataclass(slots=True)
class _Reader:
    """Where the tokens of a request go."""

    events: asyncio.Queue[Event]
    num_delivered: int = 0


class AsyncEngine:
    """Runs an engine that no other code may use; used as an asynchronous context manager.

    `engine` stays open at the end of the block: its opener owns it.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._readers: dict[int, _Reader] = {}
        """By request; written by the thread, each read by one coroutine."""
        self._suspects = deque[int]()
        """Requests of a step that failed: suspended until each has been tried alone."""
        self._on_trial: int | None = None
        """The request that is tried alone."""
        self._cleared = list[int]()
        """Requests that wait for the end of the trials: those that passed theirs, and new ones."""
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
            RequestFailedError: a step failed with this request.
            EngineDeadError: the engine can compute nothing any more.
        """
        reader = _Reader(asyncio.Queue())
        request_id = await self._call(lambda: self._add(prompt, params, reader))
        try:
            while True:
                event = await reader.events.get()
                if isinstance(event, EngineError):
                    raise event
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
            self._try_next()
            self._take_commands()
            if self._has_work:
                try:
                    outputs = self._engine.step()
                except Exception as error:
                    self._recover(error)
                else:
                    self._deliver(outputs)

    def _recover(self, error: Exception) -> None:
        """Find out which request a step fails with: alone it is known, of several each is tried alone."""
        try:
            members = [reader for reader in self._readers if reader not in (*self._suspects, *self._cleared)]
            members = [member for member in members if self._is_suspended(member, error)]
            if len(members) == 1:
                self._end(members[0], error)
                self._check_engine()
            else:
                self._suspects.extend(members)
            self._on_trial = None
        except Exception:
            self._fail(error)

    def _is_suspended(self, request_id: int, error: Exception) -> bool:
        """Suspend a request of the step, or end it: one whose next token was chosen and lost would have a gap."""
        with suppress(RequestError):  # it has finished, and its last token is lost
            self._engine.suspend(request_id)
            if self._engine.num_new_tokens(request_id) == self._readers[request_id].num_delivered:
                return True
        self._end(request_id, error)
        return False

    def _end(self, request_id: int, error: Exception) -> None:
        """Give a suspended request its error."""
        with suppress(RequestError):
            self._engine.resume(request_id)
            self._engine.abort(request_id)
        failed = RequestFailedError(f"the engine fails with this request: {type(error).__name__}: {error}")
        self._in_loop(self._readers.pop(request_id).events.put_nowait, failed)

    def _check_engine(self) -> None:
        """Compute the plainest request there is; what it raises shows that the engine is dead."""
        self._engine.add_request([0], SamplingParams(max_new_tokens=1))
        while self._engine.has_unfinished():
            self._engine.step()

    def _try_next(self) -> None:
        """Try the next suspect alone; after the last one all go on."""
        if self._on_trial is None and self._suspects:
            self._on_trial = self._suspects.popleft()
            self._engine.resume(self._on_trial)
        elif self._on_trial is None:
            while self._cleared:
                self._engine.resume(self._cleared.pop(0))

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
            self._in_loop(reader.events.put_nowait, _dead(error))
        self._readers.clear()

    def _add(self, prompt: Sequence[int], params: SamplingParams, reader: _Reader) -> int:
        if self._error is not None:
            raise _dead(self._error)
        request_id = self._engine.add_request(prompt, params)
        self._readers[request_id] = reader
        if self._on_trial is not None:
            self._engine.suspend(request_id)
            self._cleared.append(request_id)
        return request_id

    def _abort(self, request_id: int) -> None:
        if self._readers.pop(request_id, None) is None:
            return
        for suspended in (self._suspects, self._cleared):
            if request_id in suspended:
                suspended.remove(request_id)
                self._engine.resume(request_id)
        if request_id == self._on_trial:
            self._on_trial = None
        with suppress(RequestError):  # it has finished
            self._engine.abort(request_id)

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            reader = self._readers[output.request_id]
            reader.num_delivered += 1
            if output.finish_reason is not None:
                del self._readers[output.request_id]
            self._in_loop(reader.events.put_nowait, output)
            if output.request_id == self._on_trial:
                self._on_trial = None
                if output.finish_reason is None:
                    self._engine.suspend(output.request_id)
                    self._cleared.append(output.request_id)

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
