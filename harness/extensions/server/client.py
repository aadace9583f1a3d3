"""Requests over HTTP, with retries. Every way in which a server fails to answer is an error with its own code."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from harness.base.files import parse_json
from harness.errors import Code, HarnessError
from harness.extensions.server.address import Address, api_key

T = TypeVar("T")

_MAX_WORDS = 240
"""Characters of what a server says that are shown."""
_MAX_BYTES, _MAX_EVENTS = 64 << 20, 1 << 17
"""Most bytes of an answer, streamed or whole, and most events of a stream, of which a token has one."""
_ANSWER_TIMEOUTS = 10
"""Most time from a request to the end of its answer, in read timeouts: a server may stream for ever."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 20.0
_AGAIN = {408, 425, 429, 500, 502, 503, 504}
"""Statuses that another try may change."""


class _RetryError(Exception):
    """A failure that another try may mend. The server may ask the client to wait for `wait_s`."""

    def __init__(self, error: HarnessError, wait_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error, self.wait_s = error, wait_s


class Client:
    """Sends requests to one server, `address.concurrency` at a time. Use it as an asynchronous context manager."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._key = api_key()
        self._free = asyncio.Semaphore(address.concurrency)
        self.num_retries = 0
        """Requests that were sent another time."""
        self.waited_s = 0.0
        """Seconds between tries."""
        self._num_bodies, self._num_open, self._most_open, self._fields = 0, 0, 0, set[str]()

    async def __aenter__(self) -> Self:
        headers = {"accept": "application/json", "accept-encoding": "identity"} | (
            {"authorization": f"Bearer {self._key}"} if self._key else {}
        )
        self._http = httpx.AsyncClient(
            base_url=self.address.url,
            headers=headers,
            timeout=httpx.Timeout(self.address.timeout_s, pool=None),
            limits=httpx.Limits(max_connections=self.address.concurrency),
            trust_env=not self.address.is_loopback,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    @property
    def not_asked(self) -> str:
        """What no request was, so that nothing is known of it."""
        sizes = f"more than {self._most_open} requests at once or {self._num_bodies:,} in all"
        kinds = "pauses, other clients, several prompts in a request, no max_tokens"
        return f"{sizes}, {kinds}, fields besides {', '.join(sorted(self._fields))}"

    async def get(self, path: str) -> Any:
        """Return a page's JSON; raises HarnessError as `post`."""
        return await self._with_retries(lambda: self._once("GET", path, None))

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON that answers a body.

        Raises:
            HarnessError: ENDPOINT_UNREACHABLE, ENDPOINT_REFUSED, ENDPOINT_UNREADABLE, ENDPOINT_TIMED_OUT or
                ENDPOINT_HUNG_UP.
        """
        return await self._with_retries(lambda: self._once("POST", path, body))

    async def stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """Return the events of a stream, which must end with `[DONE]`; raises HarnessError as `post`."""
        return [event for _, event in await self.timed_stream(path, body)]

    async def timed_stream(self, path: str, body: Mapping[str, Any]) -> list[tuple[float, Any]]:
        """Return the events of a stream, each with the second of `time.perf_counter` at which it came."""
        return await self._with_retries(lambda: self._stream_once(path, body))

    async def _with_retries(self, send: Callable[[], Awaitable[T]]) -> T:
        """Send a request, and send it again after a failure that may pass."""
        async with self._free:
            for attempt in range(self.address.retries + 1):
                try:
                    async with asyncio.timeout(_ANSWER_TIMEOUTS * self.address.timeout_s):
                        return await send()
                except TimeoutError:
                    seconds = _ANSWER_TIMEOUTS * self.address.timeout_s
                    what, hint = f"the answer has not ended after {seconds:g} s", "raise --request-timeout"
                    raise self._error(Code.ENDPOINT_TIMED_OUT, what, "", None, hint=hint) from None
                except _RetryError as failure:
                    if attempt == self.address.retries:
                        raise failure.error from None
                    wait_s = min(failure.wait_s or _FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S)
                    self.num_retries += 1
                    self.waited_s += wait_s
                    await asyncio.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        async with self._opened(method, path, body) as response:
            text = await self._read(response, path)
        try:
            return parse_json(text)
        except ValueError:
            raise self._unreadable(path, "the answer is no JSON", text) from None

    async def _stream_once(self, path: str, body: Mapping[str, Any]) -> list[tuple[float, Any]]:
        events: list[tuple[float, Any]] = []
        async with self._opened("POST", path, {**body, "stream": True}) as response:
            async for line in self._lines(response, path):
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:"):
                    continue
                if data == "[DONE]":
                    return events
                try:
                    events.append((time.perf_counter(), parse_json(data)))
                except ValueError:
                    raise self._unreadable(path, "an event of the stream is no JSON", data) from None
                if len(events) > _MAX_EVENTS:
                    raise self._unreadable(path, f"the stream has more than {_MAX_EVENTS:,} events", data)
                if isinstance(events[-1][1], dict) and events[-1][1].get("error"):
                    raise self._error(Code.ENDPOINT_REFUSED, "the stream ends with an error", path, data)
        raise _RetryError(
            self._error(Code.ENDPOINT_HUNG_UP, f"the stream ends after {len(events)} events without [DONE]", path, None)
        )

    @asynccontextmanager
    async def _opened(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncIterator[httpx.Response]:
        """Send a request, and turn all that happens to it into errors."""
        begin = time.perf_counter()
        self._num_bodies += body is not None
        self._fields.update(body or ())
        self._num_open += 1
        self._most_open = max(self._most_open, self._num_open)
        try:
            async with self._http.stream(method, path, json=body) as response:
                if not response.is_success:
                    raise await self._refused(response, path)
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            what = f"the server cannot be reached: {self._clean(str(error)) or type(error).__name__}"
            raise _RetryError(self._error(Code.ENDPOINT_UNREACHABLE, what, path, None)) from error
        except httpx.TimeoutException as error:
            seconds = time.perf_counter() - begin
            what = f"the server said nothing for {self.address.timeout_s:g} s ({seconds:.1f} s after the request)"
            hint = "raise --request-timeout, lower --concurrency, or look at the server's log"
            raise self._error(Code.ENDPOINT_TIMED_OUT, what, path, None, hint=hint) from error
        except httpx.TransportError as error:
            what = f"the connection ended in the middle of an answer: {self._clean(str(error)) or type(error).__name__}"
            raise _RetryError(self._error(Code.ENDPOINT_HUNG_UP, what, path, None)) from error
        finally:
            self._num_open -= 1

    async def _read(self, response: httpx.Response, path: str) -> str:
        parts = [part async for part in self._parts(response, path)]
        return b"".join(parts).decode("utf-8", errors="replace")

    async def _lines(self, response: httpx.Response, path: str) -> AsyncIterator[str]:
        rest = bytearray()
        async for part in self._parts(response, path):
            rest += part
            if b"\n" in part:
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    yield line.decode("utf-8", errors="replace")
        yield rest.decode("utf-8", errors="replace")

    async def _parts(self, response: httpx.Response, path: str) -> AsyncIterator[bytes]:
        size = 0
        async for part in response.aiter_bytes():
            size += len(part)
            if size > _MAX_BYTES:
                raise self._unreadable(path, f"the answer is longer than {_MAX_BYTES >> 20} MiB", "")
            yield part

    async def _refused(self, response: httpx.Response, path: str) -> Exception:
        words, status = await self._read(response, path), response.status_code
        hint = {
            401: "put the key into the environment variable HARNESS_API_KEY",
            403: "put a key that may do this into the environment variable HARNESS_API_KEY",
            404: "the page or the model is not there: look at --served-model and the URL",
            429: "lower --concurrency",
        }.get(status)
        what = _answers_with(status)
        error = self._error(Code.ENDPOINT_REFUSED, what, path, _message(words), hint=hint)
        return _RetryError(error, _seconds(response.headers.get("retry-after"))) if status in _AGAIN else error

    def _unreadable(self, path: str, what: str, words: str) -> HarnessError:
        hint = "is there a proxy, or another program, at this address?" if "<" in words[:200] else None
        return self._error(Code.ENDPOINT_UNREADABLE, what, path, words, hint=hint)

    def _error(self, code: Code, what: str, path: str, words: str | None, *, hint: str | None = None) -> HarnessError:
        actual = None if words is None else self._clean(words) or "nothing"
        return HarnessError(code, what, where=f"{self.address.url}{path}", actual=actual, hint=hint)

    def _clean(self, words: str) -> str:
        """Return the server's own words: cut, on one line, without the key and without control characters."""
        if self._key:
            words = words.replace(self._key, "[key]")
        line = " ".join(words.split())
        return line if len(line) <= _MAX_WORDS else f"{line[:_MAX_WORDS]}..."


def _answers_with(status: int) -> str:
    return f"the server answers with status {status}"


def has_status(error: HarnessError, statuses: Collection[int]) -> bool:
    """Whether an error is that a server answered with one of some statuses."""
    return error.what in map(_answers_with, statuses)


def _message(words: str) -> str:
    """Return what an error's body says, in any of the usual forms."""
    try:
        body = parse_json(words)
    except ValueError:
        return words
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return message if isinstance(message, str) else words


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:  # a date
        return None
