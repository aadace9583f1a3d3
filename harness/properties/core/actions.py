"""State machines whose actions can be run again without Hypothesis, which is what makes a failure small.

All actions are one rule. As rules of their own, Hypothesis would turn some off at random in each example; but here most
need another before them, and nothing can be appended where nothing was allocated: many examples would be empty.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from harness.properties.core.subject import Subject

__all__ = ["ActionMachine", "Impossible", "Step", "action", "token_lists"]

Step = tuple[str, dict[str, Any]]
"""An action's name and its arguments."""

F = TypeVar("F", bound=Callable[..., None])


class Impossible(Exception):  # noqa: N818  # it says that an action does not apply, which is no error
    """An action has nothing to work on; where an example is run again without some steps, it is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """When and with what an action is run."""

    weight: int
    """How often it is chosen, against the others."""
    when: Callable[[Any], object]
    """Whether the machine has something for it to work on."""
    strategies: Mapping[str, st.SearchStrategy[Any]]
    """What its arguments are drawn from."""


def action(
    *, weight: int = 1, when: Callable[[Any], object] = bool, **strategies: st.SearchStrategy[Any]
) -> Callable[[F], F]:
    """Make a method an action of an `ActionMachine`."""

    def mark(method: F) -> F:
        method.action = Action(weight=weight, when=when, strategies=strategies)  # type: ignore[attr-defined]
        return method

    return mark


class ActionMachine(RuleBasedStateMachine):
    """Runs `start` and then its actions in any order; verifies `holds` after each, and `drains` in the end.

    A subclass has a method `start`, which makes the code under test, besides these two and its actions.
    """

    subject: Subject
    """The code under test, once the machine has started."""
    starts: ClassVar[Mapping[str, st.SearchStrategy[Any]]]
    """What the arguments of `start` are drawn from."""
    actions: ClassVar[Mapping[str, Action]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        marked = {name: entry.action for name, entry in vars(cls).items() if hasattr(entry, "action")}
        # Hypothesis leans to the first of several: that should be the one that is wanted most.
        cls.actions = dict(sorted(marked.items(), key=lambda item: -item[1].weight))

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[Step] = []
        self.is_broken = False

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """Start with sizes that Hypothesis chooses."""
        self.run_step("start", {name: data.draw(strategy) for name, strategy in self.starts.items()})

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Run an action that Hypothesis chooses among those that have something to work on."""
        names = [name for name, entry in self.actions.items() if entry.when(self) for _ in range(entry.weight)]
        name = data.draw(st.sampled_from(names))
        strategies = self.actions[name].strategies
        self.run_step(name, {key: data.draw(strategy) for key, strategy in strategies.items()})

    def run_step(self, name: str, arguments: dict[str, Any]) -> None:
        """Run one action and note it."""
        self.trace.append((name, deepcopy(arguments)))
        self.is_broken = True  # until it is through
        getattr(self, name)(**arguments)
        self.is_broken = False

    @invariant()
    def verify(self) -> None:
        """Verify what must always hold."""
        if self.trace:
            self.is_broken = True
            self.holds()
            self.is_broken = False

    def teardown(self) -> None:
        """Drain, unless something is broken already."""
        if self.trace and not self.is_broken:
            self.drains()

    def holds(self) -> None:
        """Verify what must always hold."""
        raise NotImplementedError

    def drains(self) -> None:
        """Verify that all requests can go, and what is left then."""
        raise NotImplementedError


def token_lists(max_size: int, *, min_size: int = 1) -> st.SearchStrategy[list[int]]:
    """Return a strategy of lists of zeros and ones, which takes two draws where `lists` takes two for each element."""

    def spell(size_and_bits: tuple[int, int]) -> list[int]:
        size, bits = size_and_bits
        return [bits >> index & 1 for index in range(size)]

    return st.tuples(st.integers(min_size, max_size), st.integers(0, 2**max_size - 1)).map(spell)
