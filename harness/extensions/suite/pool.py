"""Pools that run tasks: the driver's view of processes here, and of a cluster."""

from dataclasses import dataclass
from typing import Protocol

from harness.extensions.suite.task import Found, SuiteCase, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A task that is no longer running."""

    task: Task
    found: Found
    node: str | None
    """Name of the machine that it ran on, as far as it is known."""


class Pool(Protocol):
    """Runs tasks."""

    @property
    def num_workers(self) -> int:
        """Tasks of one CPU that can run at once."""

    def refusal(self, case: SuiteCase) -> str | None:
        """Say what there is, where no machine has all that a case asks for; None if one has."""

    def has_room(self, task: Task) -> bool:
        """Whether the task can be handed over now."""

    def submit(self, task: Task) -> None:
        """Hand a task over; it is run once."""

    def wait(self, timeout_s: float) -> list[Ended]:
        """Return the tasks that ended since the last call; wait for one, but not longer than that."""

    def close(self) -> None:
        """End what runs, and give everything back."""
