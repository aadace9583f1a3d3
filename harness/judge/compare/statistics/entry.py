"""The result of a statistic over an operation of which no single row is out of bounds."""

from collections.abc import Callable
from dataclasses import dataclass

from harness.errors import Code
from harness.judge.compare.local_judge import LocalErrors
from harness.results.check import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """An effect that rounding does not have, seen in an operation's rows together."""

    verdict: Verdict
    code: Code
    message: str
    """A sentence without its subject, which is the operation: `has a gain of ...`."""


Statistic = Callable[[LocalErrors], Departure | None]
"""Looks at an operation whose rows are all within bounds, and returns None if they are as rounding leaves them."""
