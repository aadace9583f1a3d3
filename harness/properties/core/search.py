"""Search for calls that break an invariant, with the effort of a profile, and report each broken invariant once."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st
from hypothesis.errors import Flaky, StopTest, Unsatisfiable

from harness.errors import Code, HarnessError
from harness.properties.core.findings import (
    Invariant,
    PropertyError,
    PropertyFinding,
    RejectedError,
    Rejections,
    Violation,
)
from harness.properties.core.machine import Machine, Step
from harness.properties.core.minimize import AnsweredExample, difference, minimize
from harness.properties.core.subject import CALL_LIMIT_S, SHRINKING_LIMIT_S, Subject, time_limit

SAMPLE_EVERY = 8
"""One of this many examples runs a second time, to compare the answers."""
MOST_SAMPLES = 25
MOST_RESTARTS = 8
"""Of a search that ends because the code under test is not deterministic."""
MOST_SHRUNK = 3
"""Examples of each broken invariant that are made smaller: not all of them end in the shortest program."""


class EnoughFoundError(BaseException):
    """Ends a search at its first finding; not an Exception, so that Hypothesis does not try it again."""


@dataclass(slots=True, kw_only=True)
class SearchReport:
    """The result of a search."""

    findings: list[PropertyFinding] = field(default_factory=list)
    """The worst first."""
    num_examples: int = 0
    rejections: Rejections = field(default_factory=Rejections)
    """How many examples the adapter rejected, by its reason."""
    not_checked: list[str] = field(default_factory=list)
    """What the examples could not check, beside what the adapter does not offer."""

    def raise_findings(self, accepted: Collection[int] = ()) -> None:
        """Raise the findings, except those of accepted invariants.

        Raises:
            PropertyError: there are some.
            HarnessError: NOTHING_CHECKED: the adapter rejected every example.
        """
        findings = [finding for finding in self.findings if finding.invariant not in accepted]
        if findings:
            raise PropertyError(*findings)
        if self.num_examples == self.rejections.total():
            raise HarnessError(
                Code.NOTHING_CHECKED, f"the adapter rejected all {self.num_examples} examples",
                where="the adapter", actual=self.rejections.most_common(1)[0][0] if self.rejections else "no example",
                hint="declare the sizes that it serves",
            )  # fmt: skip


def search(make: Callable[[], Machine], settings: Settings, *, is_first_enough: bool = False) -> SearchReport:
    """Run examples of a machine and return every invariant that one of them broke, with its shortest program.

    `is_first_enough`: end at the first example that breaks one.
    """
    examples = _Examples(make, is_first_enough=is_first_enough)
    with time_limit(CALL_LIMIT_S):
        is_steady = _run(examples, settings)
    with time_limit(SHRINKING_LIMIT_S):
        findings = {invariant: examples.smallest(invariant) for invariant in examples.broken}
        difference_finding = difference(make, examples.samples, is_certain=not is_steady)
    if difference_finding is not None:
        findings[Invariant.DETERMINISM] = difference_finding
    worst_first = [findings[invariant] for invariant in sorted(findings, key=lambda broken: (broken.severity, broken))]
    return SearchReport(findings=worst_first, num_examples=examples.num_examples, rejections=examples.rejections)


def _run(examples: "_Examples", settings: Settings) -> bool:
    """Run all examples; tell whether the code under test took the same course whenever the same was drawn."""
    for restart in range(MOST_RESTARTS):
        left = Settings(settings, max_examples=max(1, settings.max_examples - examples.num_examples))

        def run(data: st.DataObject) -> None:
            examples.try_example(data, settings.stateful_step_count)

        given_run = given(st.data())(run)
        try:
            left(seed(restart)(given_run) if restart else given_run)()
        except (EnoughFoundError, Unsatisfiable):
            return restart == 0
        except Flaky:  # the same draws met different choices
            continue
        return restart == 0
    return False


class Hits:
    """What the examples of a search found in a cache, together.

    Attributes:
        num_hits: allocations and look-ups that found something.
        miss: the shortest example that found nothing where a prefix was computed before, and nothing was evicted since.
        is_finding: whether that is a finding; if not, the code under test may have no cache.
    """

    def __init__(self) -> None:
        self.num_hits = 0
        self.miss: PropertyFinding | None = None
        self.is_finding = False
        self._num_calls = 0

    def note_miss(self, violation: Violation, subject: Subject, *, is_finding: bool) -> None:
        """Keep a miss if it is the shortest."""
        if self.miss is None or len(subject.calls) < self._num_calls:
            self.miss = PropertyFinding.of(violation, subject.program(violation))
            self.is_finding, self._num_calls = is_finding, len(subject.calls)


class _Examples:
    """The violations of the examples so far."""

    def __init__(self, make: Callable[[], Machine], *, is_first_enough: bool) -> None:
        self._make = make
        self._is_first_enough = is_first_enough
        self.num_examples = 0
        self.rejections = Rejections()
        self.broken: dict[Invariant, list[tuple[list[Step], Violation, Machine]]] = {}
        """By invariant, the shortest examples that broke it."""
        self.samples: list[AnsweredExample] = []

    def try_example(self, data: st.DataObject, num_steps: int) -> None:
        """Run one example and note its violations, or that the adapter rejects it."""
        self.num_examples += 1
        machine = self._make()
        no_more: StopTest | None = None
        try:
            try:
                machine.run_drawn(data, num_steps)
            except StopTest as stop:  # Hypothesis has no more numbers for this example: it ends where it is
                no_more = stop
            if machine.trace:
                machine.drain()
        except Violation as violation:
            self._note(violation, machine.trace, machine)
        except RejectedError as error:
            self.rejections[str(error)] += 1
            if no_more is None:
                reject()
        self._keep(machine)
        if no_more is not None:
            raise no_more

    def _keep(self, machine: Machine) -> None:
        """Keep what an example has noted; some are run again later."""
        for noted, trace in machine.noted.values():
            self._note(noted, trace, machine)
        if self.num_examples % SAMPLE_EVERY == 1 and len(self.samples) < MOST_SAMPLES and machine.trace:
            self.samples.append(AnsweredExample(trace=list(machine.trace), calls=list(machine.subject.calls)))
        if self.broken and self._is_first_enough:
            raise EnoughFoundError

    def smallest(self, invariant: Invariant) -> PropertyFinding:
        """Return the shortest program that breaks an invariant."""
        shrunk = [
            minimize(self._make, trace, invariant, hangs=violation.hangs)
            for trace, violation, _ in self.broken[invariant]
        ]
        smallest_example = min(filter(None, shrunk), key=lambda smallest: smallest.cost, default=None)
        if smallest_example is not None:
            return PropertyFinding.of(
                smallest_example.violation, smallest_example.machine.subject.program(smallest_example.violation)
            )
        _, violation, machine = self.broken[invariant][0]
        what = f"{violation.what}; the same calls a second time did not show it"
        return PropertyFinding.of(Violation(invariant, what), machine.subject.program(violation))

    def _note(self, violation: Violation, trace: list[Step], machine: Machine) -> None:
        broken = self.broken.setdefault(violation.invariant, [])
        broken.append((trace, violation, machine))
        broken.sort(key=lambda entry: len(entry[0]))
        del broken[MOST_SHRUNK:]


def search_cache(
    kind: str, make: Callable[[Hits], Machine], settings: Settings, *, is_first_enough: bool = False
) -> SearchReport:
    """Search as `search` does; a miss is also a finding if some example should have had a hit and none had one."""
    hits = Hits()
    report = search(lambda: make(hits), settings, is_first_enough=is_first_enough)
    if hits.miss is not None and not hits.num_hits and hits.is_finding:
        report.findings.append(hits.miss)
    elif hits.miss is not None and not hits.num_hits:
        report.not_checked.append(
            f"{kind}: no lookup, and no allocation of {report.num_examples} examples found anything: whether a "
            "prefix cache finds what it holds (17)"
        )
    return report


def not_offered(
    subject: Subject, kind: str, optional: Mapping[str, tuple[str, tuple[int, ...]]], starts: str, equal: int
) -> list[str]:
    """Name the optional methods and keywords that are absent, with the invariants that depend on them.

    `starts`: the method that starts a request. `equal`: the invariant that says what a hit is equal in.
    """
    lines = [
        f"{kind}: no {method} ({', '.join(map(str, invariants))})"
        for method, (_, invariants) in optional.items()
        if not subject.offers(method)
    ]
    if not subject.adapter.takes("hash_bits"):
        lines.append(f"{kind}: no keyword hash_bits: hashes do not collide ({equal})")
    if not subject.takes(starts, "salt"):
        lines.append(f"{kind}: {starts} has no keyword salt ({equal})")
    longest = max(profile.num_steps for profile in PROFILES.values())
    return [*lines, f"{kind}: what goes wrong only after more than {longest} calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One set of settings."""

    max_examples: int
    """Examples of each property."""
    num_steps: int
    """Rules that a state machine runs in one example."""
    derandomize: bool
    """Whether every run tries the same examples; otherwise `--hypothesis-seed` chooses.

    Among them are numbers that stand in the loaded modules: with other code, a few examples are others.
    """

    def settings(self) -> settings:
        """Return Hypothesis settings. No deadline: an engine's first call may compile."""
        return settings(
            max_examples=self.max_examples,
            stateful_step_count=self.num_steps,
            derandomize=self.derandomize,
            database=None,
            deadline=None,
            phases=(Phase.generate,),  # making it smaller is `minimize`
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )


PROFILES = {
    "dev": Profile(max_examples=100, num_steps=30, derandomize=True),
    "ci": Profile(max_examples=1_000, num_steps=40, derandomize=True),
    "thorough": Profile(max_examples=20_000, num_steps=50, derandomize=False),
}
"""By the name that `--properties-profile` takes."""
