"""A change of the model, which is made for the time of a trial."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

LIKELY, POSSIBLE, UNLIKELY = range(3)
"""Ranks: what is left out, exchanged or a branch; other constants, names and operators; what is rounded or fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldChange:
    """A change in words."""

    cause: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChange:
    """One change of the code that a module runs, or of what it holds."""

    module: str
    """Path of the innermost module that it concerns."""
    rank: int
    make: Callable[[float], AbstractContextManager[None]]
    """Makes it for the duration of a block, by the number that is fitted in it.

    Raises:
        SyntaxError, ValueError: it cannot be made.
    """
    tell: Callable[[float], ToldChange]
    is_fitted: bool = False
    is_vague: bool = False
    """Whether it has no term of the field: what has one and fits as well comes first."""
