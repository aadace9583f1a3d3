"""Conventions: legitimate orders of rounding that are not the default one, in one table.

An operation that is out of bounds against the truth is judged under each entry that applies to it. The entry under
which the fewest rows fail is the engine's convention, and its verdict counts. A new convention is one entry in the
table of its kind of operation, in this folder (docs/how-verdicts-work.md). An extension adds a module with such a
table.
"""

import itertools
from collections.abc import Sequence
from functools import cache

from harness.base import plugins
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
    """Return the conventions of the core, then those of extensions.

    Raises:
        HarnessError: EXTENSION_FAILED.
    """
    tables = plugins.load_all(plugins.CONVENTIONS, _table).values()
    return (*_CORE, *itertools.chain.from_iterable(tables))


def _table(module: object) -> Sequence[Convention]:
    table = getattr(module, "CONVENTIONS", None)
    if not isinstance(table, list | tuple) or not all(isinstance(entry, Convention) for entry in table):
        raise TypeError("has no CONVENTIONS: a list or tuple of Convention")
    return table


def conventions(kind: Kind) -> list[Convention]:
    """Return the conventions of a kind of operation, the likelier ones first."""
    return [convention for convention in all_conventions() if kind in convention.kinds]


__all__ = ["Convention", "Rounding", "SuspectRows", "all_conventions", "conventions"]
