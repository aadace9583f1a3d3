"""How long work says how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and how much there is."""


def no_progress(_label: str, _done: int, _total: int) -> None:
    """Tell nobody."""
