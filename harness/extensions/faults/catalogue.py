"""All faults, by id."""

from collections.abc import Mapping

from harness.errors import Code, HarnessError
from harness.extensions.faults import (
    attention,
    cache,
    drafts,
    experts,
    formulas,
    latent,
    norm,
    numbers,
    outside,
    parts,
    paths,
    position,
    sampling,
    weights,
)
from harness.extensions.faults.fault import Category, Fault
from harness.extensions.faults.half import in_16_bits

_MODULES = (
    position,
    norm,
    weights,
    attention,
    cache,
    drafts,
    sampling,
    formulas,
    latent,
    numbers,
    outside,
    parts,
    paths,
    experts,
)
_FAULTS = [fault for module in _MODULES for fault in module.FAULTS]
FAULTS: Mapping[str, Fault] = {fault.id: fault for fault in [*_FAULTS, *in_16_bits(_FAULTS)]}


def choose(ids: list[str] | None = None, categories: list[str] | None = None) -> list[Fault]:
    """Return the faults of these ids or categories, all of them by default.

    Raises:
        HarnessError: BAD_OPTION: there is no such fault or category.
    """
    for unknown in [id for id in ids or [] if id not in FAULTS]:
        known = ", ".join(FAULTS)
        raise HarnessError(Code.BAD_OPTION, f"no fault is called {unknown!r}", where="fault", expected=known)
    for unknown in [name for name in categories or [] if name not in list(Category)]:
        known = ", ".join(Category)
        raise HarnessError(Code.BAD_OPTION, f"no category is called {unknown!r}", where="--category", expected=known)
    return [
        fault
        for fault in FAULTS.values()
        if (not ids or fault.id in ids) and (not categories or fault.category in categories)
    ]
