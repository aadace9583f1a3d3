"""Grades of answers, and their counts with Wilson's intervals."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from harness.extensions.faults.answer import ToolAnswer
from harness.extensions.faults.benchmark import AskedTool
from harness.extensions.faults.fault import NOTHING, Fault, Variant

_Z = 1.96
"""Of an interval of 95 %."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How often something was so."""

    count: int
    total: int

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval of 95 %; from 0 to 1 if nothing was tried."""
        if self.total == 0:
            return 0.0, 1.0
        share, spread = self.count / self.total, _Z**2 / self.total
        centre = share + spread / 2
        half = _Z * sqrt(share * (1 - share) / self.total + spread / (4 * self.total))
        low, high = (centre - half) / (1 + spread), (centre + half) / (1 + spread)
        return max(0.0, low) if self.count else 0.0, min(1.0, high) if self.count < self.total else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What is right in an answer about one fault."""

    fault: Fault
    detected: bool
    exact: bool
    """The operation is the true one."""
    within_one: bool
    """The operation is the true one, the one before it or the one behind it."""
    row: bool
    """The operation and its first wrong row are the true ones."""
    named: bool
    """A true cause is asserted."""
    named_wrongly: bool
    """A cause is asserted that is not true."""
    answer: ToolAnswer | None
    problem: str


def grade(fault: Fault, answer: ToolAnswer | None, *, distance: int | None = None, problem: str = "") -> Grade:
    """Return the grade of an answer; None for no answer.

    What an engine raises is right where no operation is the truth; else the code with the mistake has failed itself.
    """
    if answer is None or answer.error is not None:
        is_right = answer is not None and fault.tap is None
        said = "" if answer is None else answer.error or ""
        named = is_right and fault.is_cause(said)
        return Grade(
            fault=fault, detected=is_right, exact=is_right, within_one=is_right, row=is_right, named=named,
            named_wrongly=False, answer=answer, problem=problem,
        )  # fmt: skip
    exact = fault.is_at(answer.operation) or distance == 0
    named = answer.cause is not None and fault.is_cause(answer.cause)
    return Grade(
        fault=fault,
        detected=not answer.is_sound,
        exact=exact,
        within_one=exact or distance == 1,
        row=exact and fault.is_row(answer.row),
        named=named,
        named_wrongly=answer.cause is not None and not named,
        answer=answer,
        problem=problem,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """What a tool says of a sound variant."""

    variant: Variant
    is_alarm: bool
    answer: ToolAnswer | None
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Everything that one tool answered."""

    tool: str
    is_rule: bool
    """Only the published rule of the tool is run."""
    num_lines: int
    """Lines of code of its adapter."""
    grades: Sequence[Grade]
    alarms: Sequence[Alarm]
    seconds: Sequence[float]
    notes: Mapping[str, int]
    """What the tool did besides, and how often."""
    num_refused: int
    """Engines of kinds that the tool does not take; they are not counted."""

    def rate(self, name: str) -> Rate:
        """Return how often a field of `Grade` is true; `named` of the faults of which a known cause is true."""
        grades = [grade for grade in self.grades if name != "named" or grade.fault.cause != NOTHING]
        return Rate(sum(bool(getattr(grade, name)) for grade in grades), len(grades))

    @property
    def false_alarms(self) -> Rate:
        """Return how often a sound variant alarmed, of those with an answer."""
        return Rate(sum(alarm.is_alarm for alarm in self.alarms), len(self.alarms) - self.num_unanswered)

    @property
    def num_unanswered(self) -> int:
        """The number of sound variants without an answer."""
        return sum(alarm.answer is None for alarm in self.alarms)

    @property
    def median_seconds(self) -> float:
        """The usual time of an answer."""
        return median(self.seconds) if self.seconds else 0.0


def score(
    tool: str, asked: Iterable[AskedTool], entries: Mapping[str, Fault | Variant], *, is_rule: bool, num_lines: int
) -> Score:
    """Return the score of one of the tools that answered."""
    grades, alarms, seconds = [], [], []
    notes: dict[str, int] = {}
    num_refused = 0
    for item in asked:
        if item.is_refused:
            num_refused += 1
            continue
        entry, answer = entries[item.id], item.answers.get(tool)
        problem = item.problem or ("" if answer is not None else "no answer")
        for note in (*item.notes, *((problem.partition(":")[0],) if problem else ())):
            notes[note] = notes.get(note, 0) + 1
        seconds.append(item.seconds)
        if isinstance(entry, Fault):
            grades.append(grade(entry, answer, distance=item.distances.get(tool), problem=problem))
        else:
            is_alarm = answer is not None and not answer.is_sound
            alarms.append(Alarm(variant=entry, is_alarm=is_alarm, answer=answer, problem=problem))
    return Score(
        tool=tool, is_rule=is_rule, num_lines=num_lines, grades=grades, alarms=alarms, seconds=seconds, notes=notes,
        num_refused=num_refused,
    )  # fmt: skip
