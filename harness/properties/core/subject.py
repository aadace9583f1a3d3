"""The code under test, with a record of the calls that changed it: a failure is reported as a program.

A call that never returns is a finding, so each call has a limit of CPU time. The limit uses SIGPROF, which only the
main thread gets; calls in other threads have no limit. An endless loop uses CPU time, and a busy machine does not.
"""

import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from types import FrameType
from typing import Any, TypeVar

from hypothesis.errors import UnsatisfiedAssumption

from harness.errors import Code, HarnessError
from harness.properties.core.falsify import NamedAdapter, takes
from harness.properties.core.findings import Invariant, RejectedError, Violation

CALL_LIMIT_S = 10.0
"""CPU seconds for one call while examples are searched."""
SHRINKING_LIMIT_S = 0.25
"""CPU seconds while an example is made smaller: each attempt that does not return takes so long."""
AGAIN_S = 0.1
"""Seconds until the signal repeats, for code that swallows exceptions."""

Result = TypeVar("Result")
_limit_s: float | None = None


class HangError(BaseException):
    """A call did not return in time; not an Exception, so that the code under test does not catch it."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"did not return within {limit_s:g} s of CPU time")


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Limit each call of `call_limited`; the timer and the handler of others are put back at the end."""
    global _limit_s
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    before, _limit_s = _limit_s, limit_s
    timer = signal.setitimer(signal.ITIMER_PROF, 0)
    handler = signal.signal(signal.SIGPROF, _raise_hang)
    try:
        yield
    finally:
        _limit_s = before
        signal.signal(signal.SIGPROF, handler)
        signal.setitimer(signal.ITIMER_PROF, *timer)


def call_limited(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function within the limit.

    Raises:
        HangError: it did not return in time.
    """
    if _limit_s is None:
        return function(*args, **kwargs)
    signal.setitimer(signal.ITIMER_PROF, _limit_s, AGAIN_S)
    try:
        return function(*args, **kwargs)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _raise_hang(_: int, frame: FrameType | None) -> None:
    # An exception in a callback of the garbage collector is lost and reported as a warning; the signal comes again.
    if frame is None or not _is_callback_of_the_collector(frame):
        raise HangError(_limit_s or 0.0)


def _is_callback_of_the_collector(frame: FrameType) -> bool:
    # Hypothesis has one by this name; the standard library's remove what was collected from weak sets and dicts.
    return frame.f_code.co_name == "gc_callback" or frame.f_globals.get("__name__") in ("weakref", "_weakrefset")


SHORT = 12
"""A list of so many elements is written out."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def spell(value: object) -> str:
    """Write a value as source text; long lists of few different tokens as sums: `[0] * 256 + [1]`."""
    if isinstance(value, list) and len(value) > SHORT and all(isinstance(element, int) for element in value):
        parts = _parts(value)
        if len(parts) <= SHORT:
            return " + ".join(parts)
    return repr(value)


def plain_text(value: object) -> str:
    """Return a text that is equal for equal values: sets are sorted, addresses are left out."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(plain_text, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(plain_text, value))}]"
    return _ADDRESS.sub("", repr(value))


def _parts(tokens: Sequence[int]) -> list[str]:
    parts: list[str] = []
    single: list[int] = []
    for token, run in groupby(tokens):
        length = len(list(run))
        if length < 4:
            single += [token] * length
            continue
        parts += [str(single)] if single else []
        parts.append(f"[{token}] * {length}")
        single = []
    return [*parts, str(single)] if single else parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the code under test."""

    source: str
    result: str | None
    """Its value as source text; None if it raised."""
    answer: str = ""
    """The value as a text that is equal for equal values."""


class Subject:
    """One instance of the code under test, made by `factory(**sizes)`.

    Raises:
        HarnessError: BAD_ADAPTER: it cannot be made, or lacks one of the methods in `required`.
        RejectedError: it does not serve these sizes.
    """

    def __init__(self, factory: Any, name: str, *, required: Iterable[str] = (), **sizes: object) -> None:
        self.adapter = NamedAdapter.of(factory)
        self.name = name
        self._sizes = sizes
        self.calls: list[Call] = []
        self._target = self._make()
        missing = [method for method in required if not self.offers(method)]
        if missing:
            raise HarnessError(
                Code.BAD_ADAPTER, f"the adapter lacks {', '.join(missing)}", where=self.adapter.expression,
                expected=f"at least {', '.join(required)}", hint="docs/test-your-engine.md has a complete one",
            )  # fmt: skip

    @property
    def opening(self) -> list[str]:
        """The lines of a program that import the adapter and make it."""
        sizes = ", ".join(f"{key}={value!r}" for key, value in self._sizes.items())
        return [*self.adapter.imports, "", f"{self.name} = {self.adapter.expression}({sizes})"]

    def offers(self, method: str) -> bool:
        """Whether the code under test has an optional method."""
        return callable(getattr(self._target, method, None))

    def takes(self, method: str, keyword: str) -> bool:
        """Whether a method has an optional parameter."""
        return takes(getattr(self._target, method), keyword)

    def attribute(self, name: str) -> Any:
        """Return an optional attribute, None if it is absent."""
        return getattr(self._target, name, None)

    def do(self, invariant: Invariant, method: str, *args: object, **kwargs: object) -> Any:
        """Call a method that may change state, and record the call.

        Raises:
            Violation: of `invariant`: the call raised.
        """
        source = self._source(method, args, kwargs)
        try:
            result = call_limited(getattr(self._target, method), *args, **kwargs)
        except UnsatisfiedAssumption as error:
            raise RejectedError(_described(error)) from error
        except HangError as error:
            self.calls.append(Call(source=source, result=None))
            raise Violation(invariant, f"{method} {error}", hangs=True) from error
        except Exception as error:
            self.calls.append(Call(source=source, result=None))
            raise Violation(invariant, f"{method} raised {_described(error)}") from error
        self.calls.append(Call(source=source, result=repr(result), answer=plain_text(result)))
        return result

    def error_of(self, method: str, *args: object, **kwargs: object) -> Exception | None:
        """Call a method that should raise, record the call, and return the exception."""
        source = self._source(method, args, kwargs)
        try:
            result = getattr(self._target, method)(*args, **kwargs)
        except Exception as error:
            self.calls.append(Call(source=source, result=None))
            return error
        self.calls.append(Call(source=source, result=repr(result), answer=plain_text(result)))
        return None

    def ask(self, invariant: Invariant, method: str, *args: object, **kwargs: object) -> Any:
        """Call a method that changes nothing; the call is recorded only if it raises.

        Raises:
            Violation: of `invariant`: the call raised.
        """
        try:
            return getattr(self._target, method)(*args, **kwargs)
        except UnsatisfiedAssumption as error:
            raise RejectedError(_described(error)) from error
        except Exception as error:
            self.calls.append(Call(source=self._source(method, args, kwargs), result=None))
            raise Violation(invariant, f"{method} raised {_described(error)}") from error

    def program(self, violation: Violation) -> str:
        """Return the calls so far as a program that ends in `violation`."""
        lines = self.opening
        for number, call in enumerate(self.calls, start=1):
            is_last = number == len(self.calls)
            lines += [violation.question] if is_last and violation.question else []
            lines += _lines(call, violation, is_last=is_last)
        return "\n".join([*lines, violation.ending]).rstrip() + "\n"

    def _make(self) -> Any:
        try:
            return self.adapter.target(**self._sizes)
        except (UnsatisfiedAssumption, NotImplementedError) as error:
            raise RejectedError(_described(error)) from error
        except Exception as error:
            raise HarnessError(
                Code.BAD_ADAPTER, f"the adapter cannot be made: {_described(error)}", where=self.opening[-1],
                expected="an instance for any sizes that the adapter declares",
                hint="declare the sizes that it serves (block_sizes, pool_sizes, ...), or raise NotImplementedError",
            ) from error  # fmt: skip

    def _source(self, method: str, args: Iterable[object], kwargs: dict[str, object]) -> str:
        values = [spell(arg) for arg in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
        return f"{self.name}.{method}({', '.join(values)})"


def _lines(call: Call, violation: Violation, *, is_last: bool) -> list[str]:
    if is_last and not violation.ending:
        return [f"{call.source}  # {'does not return' if violation.hangs else 'raises'}"]
    if call.result is None:  # it was right to raise: the program goes on
        return ["try:", f"    {call.source}", "except Exception as error:", "    print(error)"]
    if is_last and "result" in violation.ending:
        return [f"result = {call.source}"]
    return [call.source if call.result == "None" else f"{call.source}  # {call.result}"]


def _described(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
