"""The code under test, with a record of the calls that changed it: a failure is told as a program of those calls."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis.errors import UnsatisfiedAssumption

from harness.errors import Code, HarnessError
from harness.properties.core.adapter import NamedAdapter, takes
from harness.properties.core.findings import RejectedError, Violation
from harness.properties.core.invariants import Invariant
from harness.properties.core.source import plain_text, spell
from harness.properties.core.watchdog import HangError, call_limited


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
        """Call what may change something, and record it.

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
        """Call what ought to raise, and return what it raised; recorded."""
        source = self._source(method, args, kwargs)
        try:
            result = getattr(self._target, method)(*args, **kwargs)
        except Exception as error:
            self.calls.append(Call(source=source, result=None))
            return error
        self.calls.append(Call(source=source, result=repr(result), answer=plain_text(result)))
        return None

    def ask(self, invariant: Invariant, method: str, *args: object, **kwargs: object) -> Any:
        """Call what changes nothing; not recorded, unless it raises.

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
