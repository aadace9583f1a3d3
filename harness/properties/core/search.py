"""Running a state machine, and telling what it found."""

from collections.abc import Callable, Mapping

from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the function here takes
from hypothesis.stateful import run_state_machine_as_test

from harness.properties.core.actions import ActionMachine
from harness.properties.core.findings import Finding, PropertyError, Violation
from harness.properties.core.minimize import minimize
from harness.properties.core.subject import Subject

__all__ = ["not_offered", "search"]


def search(make: Callable[[], ActionMachine], settings: Settings) -> None:
    """Run a state machine until it violates an invariant or the examples run out.

    Raises:
        PropertyError: the smallest example that violates one.
    """
    machines: list[ActionMachine] = []

    def make_and_keep() -> ActionMachine:
        machines[:] = [make()]
        return machines[0]

    violation = _first(make_and_keep, settings)
    if violation is not None:
        machine, smallest = minimize(make, machines[0].trace, violation)  # the last to run is the one that raised
        raise PropertyError(Finding.of(smallest, machine.subject.program(smallest)))


def _first(make: Callable[[], ActionMachine], settings: Settings) -> Violation | None:
    try:
        run_state_machine_as_test(make, settings=settings)  # type: ignore[arg-type]  # it calls what it is given
    except Violation as violation:
        return violation
    return None


def not_offered(subject: Subject, kind: str, optional: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Name the optional methods that are absent, with the invariants that depend on them."""
    return [
        f"{kind}: no {method} ({', '.join(map(str, invariants))})"
        for method, (_, invariants) in optional.items()
        if not subject.offers(method)
    ]
