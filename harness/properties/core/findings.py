"""The finding of a suite: a property that does not hold, with the shortest program that shows it.

Invariants have the numbers that findings, options and docs use.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from harness.errors import Code, HarnessError


class Severity(IntEnum):
    """The harm that a broken invariant does to users of an engine, the worst first."""

    WRONG_OUTPUT = 0
    """A request reads tokens of another request, or uncomputed ones."""
    STOPS_SERVING = 1
    """The engine crashes, hangs, or loses memory until it does."""
    UNRELIABLE = 2
    """Answers and limits do not hold, or change from run to run."""
    SLOW = 3
    """Requests are served, later or at a higher cost than necessary."""


class Invariant(IntEnum):
    """What must always hold: a number that is public, the harm if it does not hold, and one sentence."""

    severity: Severity
    text: str

    def __new__(cls, number: int, severity: Severity, text: str) -> "Invariant":
        """Make a member that equals its number."""
        member = int.__new__(cls, number)
        member._value_, member.severity, member.text = number, severity, text
        return member

    # fmt: off
    # Ownership
    POOL_PARTITION = (1, Severity.STOPS_SERVING,
        "Free and live blocks partition the pool, without duplicates, and counters equal what is walked")
    OWNER_COUNTS = 2, Severity.UNRELIABLE, "The owner count of a block is the number of tables that hold it"
    TABLE_SHARING = (3, Severity.WRONG_OUTPUT,
        "No block is twice in a table; tables share a block only at the same index, after equal tokens")
    LIVE_BLOCKS = 4, Severity.WRONG_OUTPUT, "A live table never points at a free block"
    SHARED_WRITES = 5, Severity.WRONG_OUTPUT, "A block with more than one owner, or the null block, is never written"
    ALL_FREED = (6, Severity.STOPS_SERVING,
        "When all requests are gone every block is free, and the prefix cache can be reset")

    # Content
    SLOT_CONTENT = 7, Severity.WRONG_OUTPUT, "The slot of every computed position holds exactly that prefix"
    COMPUTED_HITS = 8, Severity.WRONG_OUTPUT, "A block is found only when it is full and its K and V are computed"
    COMPUTED_ENTRIES = 9, Severity.WRONG_OUTPUT, "A block that is not fully computed has no entry in the prefix cache"
    EQUAL_HITS = (10, Severity.WRONG_OUTPUT,
        "A hit has equal tokens all the way up and the same salt, whatever the hashes say")
    EVICTED_ENTRY = 11, Severity.SLOW, "An eviction removes the entry of its own block and no other"

    # Interface
    ROOM = (12, Severity.STOPS_SERVING,
        "Asking for room is answered truthfully, never by a crash, and a failed allocation changes nothing")
    LOOKUP = 13, Severity.UNRELIABLE, "Looking a prefix up and pinning it are one step"
    ONE_TOKEN_LEFT = (14, Severity.STOPS_SERVING,
        "A prefix hit is shorter than the request: at least one token is computed")
    TABLE_LENGTH = 15, Severity.STOPS_SERVING, "A table has ceil(tokens / block_size) blocks"
    FREE_AND_COPY = (16, Severity.STOPS_SERVING,
        "A double free raises; a shared block is copied before it is appended to")
    EXPECTED_HITS = (17, Severity.SLOW,
        "Resubmitting a request, with no eviction between, finds floor((n - 1) / block_size) blocks")
    EVICTION_ORDER = 18, Severity.SLOW, "The least recently used chain is evicted first, its tail before its head"

    # Scheduler
    STEP_BUDGET = (19, Severity.UNRELIABLE,
        "Each scheduled request gets at least one and at most its remaining tokens; a step keeps within the budget")
    RUNNING_LIMIT = 20, Severity.UNRELIABLE, "No more than max_num_seqs requests run"
    ADMISSION = (21, Severity.STOPS_SERVING,
        "An impossible request is refused with the numbers; a possible one is served: no crash and no livelock")
    PROGRESS = 22, Severity.SLOW, "Every request progresses; a preempted one goes before later arrivals"
    REMOVAL = 23, Severity.STOPS_SERVING, "Preempting, aborting and finishing at any point leave all of this true"
    SAME_OUTPUT = (24, Severity.WRONG_OUTPUT,
        "The output does not depend on batching, chunks, block size, prefix caching, preemption or arrival order")
    TABLE_WIDTH = 25, Severity.UNRELIABLE, "A block table fits the width that max_model_len gives"
    EQUAL_RANKS = 26, Severity.WRONG_OUTPUT, "The pools of tensor-parallel ranks agree"

    # The code itself
    DETERMINISM = 27, Severity.UNRELIABLE, "The same calls give the same answers"

    # States of recurrent and convolutional layers
    HELD_STATE = (28, Severity.WRONG_OUTPUT,
        "The state of a request is that of exactly its computed tokens, whatever other requests do")
    RESTORED_STATE = (29, Severity.WRONG_OUTPUT,
        "A request starts from the state of the matched prefix and salt, and only what was written is matched")
    REWOUND_STATE = (30, Severity.WRONG_OUTPUT,
        "Going back leaves the state of exactly the tokens that are kept; rejected drafts are not in it")
    SNAPSHOT_STATE = (31, Severity.WRONG_OUTPUT,
        "A snapshot holds the state of its own prefix, which was written and accepted")
    TRANSFER = (32, Severity.WRONG_OUTPUT,
        "A transfer is read when it is complete, is reported once, and what failed is computed again")


Rejections = Counter[str]
"""How many inputs the adapter rejected, by its reason."""


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
    """The code under test rejects an example."""


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
        """Return the harm to users of an engine in words; None for properties of single calls."""
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
