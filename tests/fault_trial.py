"""The check of one engine with a fault in it, or of a sound variant, in this process."""

from dataclasses import dataclass

from harness.errors import Code, HarnessError
from harness.extensions.faults.answer import ToolAnswer
from harness.extensions.faults.fault import Fault, Variant
from harness.extensions.faults.subject import opened
from harness.extensions.faults.tools.check import answer_of, check
from harness.results.check import CheckResult, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTrial:
    """The result of a check."""

    result: CheckResult | None
    """None if the engine raised, and of a property suite."""
    error: HarnessError | None
    num_calls: int
    """The number of times that the injected code ran: a fault that was never reached proves nothing."""

    @property
    def is_alarm(self) -> bool:
        """Whether the check would have failed."""
        return self.error is not None or (self.result is not None and self.result.outcome is not Outcome.PASS)

    @property
    def answer(self) -> ToolAnswer:
        """Return the verdict as an answer of the benchmark."""
        if self.result is not None:
            return answer_of(self.result)
        return ToolAnswer(is_sound=self.error is None, error=None if self.error is None else str(self.error))


def try_entry(entry: Fault | Variant, *, seed: int = 0, device: str = "cpu") -> CheckTrial:
    """Check an engine with a fault in it, or run the property suite that shows it, and take the fault out again."""
    with opened(entry, seed=seed, device=device) as (subject, planted):
        try:
            if subject.suite is not None:
                subject.suite()
                return CheckTrial(result=None, error=None, num_calls=planted.num_calls)
            return CheckTrial(result=check(subject), error=None, num_calls=planted.num_calls)
        except HarnessError as error:
            if subject.suite is not None and error.code is not Code.PROPERTY_VIOLATED:
                raise
            return CheckTrial(result=None, error=error, num_calls=planted.num_calls)
