"""Conventions: legitimate orders of rounding that are not the default one, in one table.

An operation that is out of bounds against the truth is held against each entry that applies to it. The one under which
the fewest rows fail is the engine's, and the operation is held to it. A new one is one entry in the table of its kind
of operation, here in this folder (docs/how-verdicts-work.md).
"""

from harness.formats.taps import Kind
from harness.judge.compare.conventions import (
    activation,
    attention,
    checkpoint,
    experts,
    linear,
    norm,
    quantised,
    quantised_cache,
    rotary,
)
from harness.judge.compare.conventions.entry import Convention, Rounding, SuspectRows

CONVENTIONS: tuple[Convention, ...] = (
    *attention.CONVENTIONS,
    *quantised_cache.CONVENTIONS,
    *linear.CONVENTIONS,
    *quantised.CONVENTIONS,
    *checkpoint.CONVENTIONS,
    *experts.CONVENTIONS,
    *rotary.CONVENTIONS,
    *norm.CONVENTIONS,
    *activation.CONVENTIONS,
)


def conventions(kind: Kind) -> list[Convention]:
    """Return the legitimate orders of rounding of a kind of operation, the likelier first."""
    return [convention for convention in CONVENTIONS if kind in convention.kinds]


__all__ = ["CONVENTIONS", "Convention", "Rounding", "SuspectRows", "conventions"]
