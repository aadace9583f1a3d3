"""Results of a check of a user's function (a parser, a mask), as plain data. Nothing here imports torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from harness.errors import Code
from harness.results.check import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionDifference:
    """One way in which a function differs, at the smallest input that shows it."""

    code: Code
    name: str
    """`a string turned to a number`, `a special token is allowed`, ..."""
    shown: Mapping[str, str]
    """For people: what was given, expected and returned, by a label each."""
    data: Mapping[str, Any]
    """For programs: the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionResult:
    """A whole check of a function."""

    IN_DOCUMENT: ClassVar = ("outcome",)
    subject: str
    """The name of the function."""
    model: str
    counts: Mapping[str, int]
    """What was judged: `text`, `stream`; `mask`, `schema`."""
    differences: Sequence[FunctionDifference]
    not_judged: Mapping[str, str]
    """What was not judged, and why."""
    notes: Sequence[str]

    @property
    def outcome(self) -> Outcome:
        """Mismatch if anything differs; nothing, if nothing was judged."""
        if self.differences:
            return Outcome.MISMATCH
        return Outcome.PASS if any(self.counts.values()) else Outcome.NOTHING
