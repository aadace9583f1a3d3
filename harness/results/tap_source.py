"""Where a tap is in an engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TapSource:
    """The tensor of an engine that is a tap."""

    tensor: str
    """For people: the module or operator that makes it, and which columns."""
    code: str | None = None
    """Line of the engine's code that makes it, `path/to/file.py:12`; None where that is not known."""
    evidence: str = "named by the adapter"
    """Why it is taken for the tap."""
