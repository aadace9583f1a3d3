"""Progress of long work."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Receives the current task, how much of it is done, and how much there is."""


def no_progress(_label: str, _done: int, _total: int) -> None:
    """Report nothing."""
