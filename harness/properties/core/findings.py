"""The finding of a suite: a property that does not hold, told by the shortest program that shows it."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from harness.errors import Code, HarnessError
from harness.properties.core.invariants import Invariant

Rejections = Counter[str]
"""By an adapter's words: how many inputs it said it does not serve."""


class Counterexample(Exception):  # noqa: N818  # the search looks for it; a user sees a PropertyError
    """A property does not hold for an input.

    Attributes:
        what: one sentence with the values that disagree.
        program: plain Python that shows it: it ends in an assertion that fails, or in a call that raises.
    """

    def __init__(self, what: str, program: str = "") -> None:
        self.what = what
        self.program = program
        super().__init__(what)


class RejectedError(Exception):
    """The code under test says that it does not serve an example."""


class Violation(Counterexample):
    """An invariant does not hold after a sequence of calls; `Subject.program` writes the calls.

    Attributes:
        invariant: the one that does not hold.
        ending: the last lines of the program, after the recorded calls: an assertion that fails. They may name
            `result`, the value of the last call. Empty if that call itself raises.
        question: a line that stands before the last call, for an `ending` that compares the two.
        hangs: whether the last call does not return.
    """

    def __init__(
        self, invariant: Invariant, what: str, ending: str = "", question: str = "", *, hangs: bool = False
    ) -> None:
        self.hangs = hangs
        self.invariant = invariant
        self.ending = ending
        self.question = question
        super().__init__(what)

    def __str__(self) -> str:
        return f"invariant {self.invariant}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PropertyFinding:
    """One property that does not hold."""

    property: str
    """The property that should hold, in one sentence."""
    what: str
    """One sentence with the values that disagree."""
    program: str
    """Plain Python: the code under test, torch if there are tensors, and nothing else."""
    invariant: Invariant | None = None
    """The invariant that does not hold; None for properties of single calls."""

    @classmethod
    def of(cls, violation: Violation, program: str) -> "PropertyFinding":
        """Make a finding of a broken invariant."""
        invariant = violation.invariant
        property = f"invariant {invariant}: {invariant.text}"
        return cls(property=property, what=violation.what, program=program, invariant=invariant)

    def severity(self) -> str | None:
        """Return what it does to the users of an engine, in words; None for properties of single calls."""
        return None if self.invariant is None else self.invariant.severity.name.lower().replace("_", " ")

    def __str__(self) -> str:
        return f"{HarnessError(Code.PROPERTY_VIOLATED, self.what, where=self.property)}\n\n{self.program}"


class PropertyError(HarnessError):
    """One or more findings of a property suite, the worst first.

    Attributes:
        findings: each broken property once.
        property, invariant, program: those of the first finding.
    """

    def __init__(self, *findings: PropertyFinding) -> None:
        self.findings = findings
        first = findings[0]
        self.property, self.invariant, self.program = first.property, first.invariant, first.program
        more = f" ({len(findings) - 1} more)" if len(findings) > 1 else ""
        super().__init__(Code.PROPERTY_VIOLATED, first.what + more, where=first.property)

    def __str__(self) -> str:
        if len(self.findings) == 1:
            return str(self.findings[0])
        texts = []
        for number, finding in enumerate(self.findings, start=1):
            severity = f", {finding.severity()}" if finding.severity() else ""
            texts.append(f"{number} of {len(self.findings)}{severity}\n{finding}")
        return "\n".join(texts)


def raise_all(checks: Iterable[Callable[[], Rejections]]) -> Rejections:
    """Run checks of several properties, whether or not one before fails, and add up what the adapter rejected.

    Raises:
        PropertyError: the findings of all.
    """
    findings: list[PropertyFinding] = []
    rejections = Rejections()
    for check in checks:
        try:
            rejections += check()
        except PropertyError as error:
            findings += error.findings
    if findings:
        raise PropertyError(*findings)
    return rejections
