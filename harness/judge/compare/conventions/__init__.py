"""Conventions: legitimate orders of rounding that are not the default one, in one table.

An operation that is out of bounds against the truth is held against each entry that applies to it. The one under which
the fewest rows fail is the engine's, and the operation is held to it. A new one is one entry in the table of its kind
of operation, here in this folder (docs/how-verdicts-work.md); an extension brings a module with such a table.
"""

from functools import cache

from harness.base.plugins import CONVENTIONS, load_all
from harness.formats.taps import Kind
from harness.judge.compare.conventions import attention, experts, linear, rotary, rowwise
from harness.judge.compare.conventions.entry import Convention, Rounding, SuspectRows

_CORE: tuple[Convention, ...] = (
    *attention.CONVENTIONS,
    *linear.CONVENTIONS,
    *experts.CONVENTIONS,
    *rotary.CONVENTIONS,
    *rowwise.CONVENTIONS,
)


@cache
def all_conventions() -> tuple[Convention, ...]:
    """Return the conventions of the core, then those of extensions."""
    brought = (convention for module in load_all(CONVENTIONS) for convention in module.CONVENTIONS)
    return (*_CORE, *brought)


def conventions(kind: Kind) -> list[Convention]:
    """Return the legitimate orders of rounding of a kind of operation, the likelier first."""
    return [convention for convention in all_conventions() if kind in convention.kinds]


__all__ = ["Convention", "Rounding", "SuspectRows", "all_conventions", "conventions"]
