"""State machines whose actions can be run again without Hypothesis, so that a failure can be shrunk.

An example is a sequence of steps. A step is written down with the values that it worked on (request 3, tokens 0 and 1),
not with the choices that led to them, so that it means the same after other steps are left out.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st

from harness.properties.core.findings import Invariant, Violation
from harness.properties.core.subject import Subject

Step = tuple[str, dict[str, Any]]
"""An action's name and its arguments."""

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])
CHOICES = st.integers(0, 7)
"""The choice among several: the number is taken modulo their count."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """An argument whose value depends on the state of the machine.

    The strategy does not: Hypothesis prepares it once, and not for every draw.
    """

    strategy: st.SearchStrategy[Any] | None
    """None if there is nothing to choose."""
    resolve: Callable[[Any, Any], Any]
    """Returns the value for a machine and what was drawn."""
    among: Callable[[Any], object] = bool
    """Returns what a machine has to choose from; where that is empty, the action cannot be run."""


Arguments = Mapping[str, st.SearchStrategy[Any] | Drawn]
"""By argument, what it is drawn from."""


class NotApplicable(Exception):  # noqa: N818  # it says that a step cannot be run, which is no error
    """A step has nothing to work on; where an example is run again without other steps, this one is left out too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """When an action is run, and with what."""

    weight: int
    """Its frequency, against the others."""
    when: Callable[[Any], object]
    """Whether the machine has something for it to work on."""
    arguments: "Arguments"
    combined: st.SearchStrategy[tuple[Any, ...]]
    """Draws for all arguments at once."""

    @classmethod
    def of(cls, weight: int, when: Callable[[Any], object], arguments: "Arguments") -> "Action":
        """Prepare the draws of an action."""
        strategies = (entry.strategy if isinstance(entry, Drawn) else entry for entry in arguments.values())
        combined = st.tuples(*(st.none() if strategy is None else strategy for strategy in strategies))
        return cls(weight=weight, when=when, arguments=arguments, combined=combined)

    def draw(self, machine: Any, data: st.DataObject) -> dict[str, Any]:
        """Draw the arguments for a machine in its present state."""
        drawn = zip(self.arguments.items(), data.draw(self.combined), strict=True)
        return {
            name: entry.resolve(machine, value) if isinstance(entry, Drawn) else value for (name, entry), value in drawn
        }


def action(
    *,
    weight: int = 1,
    when: Callable[[Any], object] = bool,
    **arguments: st.SearchStrategy[Any] | Drawn,
) -> Callable[[F], F]:
    """Make a method an action of a `Machine`, run `when` that is so and there is something to choose from."""
    drawn = [entry for entry in arguments.values() if isinstance(entry, Drawn)]

    def is_applicable(machine: Any) -> bool:
        return bool(when(machine)) and all(entry.among(machine) for entry in drawn)

    def mark(method: F) -> F:
        method.action = Action.of(weight, is_applicable, arguments)  # type: ignore[attr-defined]
        return method

    return mark


def one_of(requests: Callable[[Any], Sequence[Any]]) -> Drawn:
    """Draw the number of one of a machine's requests."""

    def resolve(machine: Any, choice: int) -> int:
        number: int = chosen(requests(machine), choice).request_id
        return number

    return Drawn(CHOICES, resolve, requests)


def chosen(items: Sequence[T], choice: int) -> T:
    """Return one of some items, the latest for 0.

    Raises:
        NotApplicable: there are none.
    """
    if not items:
        raise NotApplicable
    return items[-1 - choice % len(items)]


class Machine:
    """Runs `start` and then its actions in any order; calls `check` after each, and `drain` in the end.

    A subclass has a method `start`, which makes the code under test, besides these two and its actions.

    Attributes:
        subject: the code under test, once the machine has started.
        offers: by optional method, whether the code under test has it.
        trace: the steps so far.
        noted: by invariant, the first violation after which the example could go on, and the steps up to it.
        wanted: the invariants whose violation ends the example; None while examples are searched.
    """

    subject: Subject
    offers: Mapping[str, bool]
    actions: ClassVar[Mapping[str, Action]]
    lengthened: ClassVar[Mapping[str, str]] = {}
    """By action that starts a request, its argument with the tokens: a longer list may save steps."""
    request_arguments: ClassVar[Set[str]] = frozenset({"request_id", "child_id"})
    """Arguments of actions that number a request."""
    enlarged: ClassVar[Set[str]] = frozenset({"budget"})
    """Arguments of `start` that may save steps if they are larger."""
    unusual: ClassVar[Set[str]] = frozenset({"hash_bits"})
    """Arguments of `start` that are None in a usual run."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        entries = {name: value for owner in reversed(cls.__mro__) for name, value in vars(owner).items()}
        marked = {name: entry.action for name, entry in entries.items() if hasattr(entry, "action")}
        # Hypothesis prefers the first of several: that should be the one that is wanted most.
        cls.actions = dict(sorted(marked.items(), key=lambda item: -item[1].weight))

    def __init__(self) -> None:
        self.trace: list[Step] = []
        self.noted: dict[Invariant, tuple[Violation, list[Step]]] = {}
        self.wanted: Collection[Invariant] | None = None

    def served_sizes(self) -> Mapping[str, Sequence[int]]:
        """Return the values that arguments of `start` may have, for those that have only some."""
        return {}

    def start_arguments(self) -> Arguments:
        """Return what the arguments of `start` are drawn from."""
        raise NotImplementedError

    def check(self) -> None:
        """Verify what must always hold."""
        raise NotImplementedError

    def drain(self) -> None:
        """Verify that all requests can go, and what is left then."""
        raise NotImplementedError

    def ask_optional(self, invariant: Invariant, method: str, *args: object, **kwargs: object) -> Any:
        """Ask an optional question; None if it is not offered."""
        return self.subject.ask(invariant, method, *args, **kwargs) if self.offers[method] else None

    def note(self, invariant: Invariant, what: str, ending: str = "", question: str = "") -> None:
        """Report a violation after which the state is still known, so that the example can go on.

        Raises:
            Violation: it is a wanted one.
        """
        violation = Violation(invariant, what, ending, question)
        if self.wanted is None:
            self.noted.setdefault(invariant, (violation, list(self.trace)))
        elif invariant in self.wanted:
            raise violation

    def run_drawn(self, data: st.DataObject, num_steps: int) -> None:
        """Run the steps of an example that Hypothesis draws; `drain` comes after it.

        Raises:
            Violation: an invariant does not hold.
        """
        self._start(Action.of(1, bool, self.start_arguments()).draw(self, data))
        for _ in range(num_steps):
            applicable = tuple(name for name, entry in self.actions.items() if entry.when(self))
            name = data.draw(self._names(applicable))
            self.run_step(name, self.actions[name].draw(self, data))

    @classmethod
    @cache
    def _names(cls, applicable: tuple[str, ...]) -> st.SearchStrategy[str]:
        return st.sampled_from([name for name in applicable for _ in range(cls.actions[name].weight)])

    def run(self, trace: Sequence[Step]) -> None:
        """Run an example again, without the steps that do not apply any more.

        Raises:
            Violation: an invariant does not hold.
            NotApplicable: it cannot even start.
        """
        (_, sizes), *steps = deepcopy(list(trace))
        self._start(sizes)
        for name, arguments in steps:
            self.run_step(name, arguments)
        self.drain()

    def _start(self, sizes: dict[str, Any]) -> None:
        if any(sizes[key] not in served for key, served in self.served_sizes().items()):
            raise NotApplicable
        self.trace.append(("start", sizes))
        getattr(self, "start")(**sizes)  # noqa: B009  # each machine has sizes of its own
        self.check()

    def run_step(self, name: str, arguments: dict[str, Any]) -> None:
        """Run one action, write it down, and verify what must always hold; nothing if it does not apply."""
        self.trace.append((name, deepcopy(arguments)))
        try:
            getattr(self, name)(**arguments)
        except NotApplicable:
            self.trace.pop()
        else:
            self.check()
