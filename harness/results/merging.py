"""How the figures of parts become those of the whole: every field of a mergeable result names its rule.

The rule stands beside the type: `num_nan: Annotated[int, TOTAL] = 0`. NaN is the largest error there is. None was not
measured, and says nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule by which one field is merged."""

    merge: Callable[[Sequence[Any], str], Any] | None
    """From the parts and the name of the field to the value of the whole; None: the value of the worst part."""


def largest(values: Iterable[float | None]) -> float | None:
    """Return the largest value, NaN if one is NaN, None if none was measured."""
    measured = [value for value in values if value is not None]
    return math.nan if any(map(math.isnan, measured)) else max(measured, default=None)


def smallest(values: Iterable[float | None]) -> float | None:
    """Return the smallest value, NaN if one is NaN, None if none was measured."""
    measured = [value for value in values if value is not None]
    return math.nan if any(map(math.isnan, measured)) else min(measured, default=None)


def upper_median(weighted: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the upper median of (value, weight), None if none was measured."""
    measured = [(value, weight) for value, weight in weighted if value is not None]
    measured.sort(key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
    half, seen = sum(weight for _, weight in measured) / 2, 0
    for value, weight in measured:
        seen += weight
        if seen > half:
            return value
    return measured[-1][0] if measured else None


def _values(parts: Sequence[Any], name: str) -> Iterator[Any]:
    return (getattr(part, name) for part in parts)


def _computed(parts: Sequence[Any]) -> Sequence[Any]:
    """Leave out caches that were read back: their exact zeros say nothing of operations they may be folded with."""
    return [part for part in parts if part.judged_by != "cache"] or parts


def _median(parts: Sequence[Any], name: str) -> float | None:
    return upper_median((getattr(part, name), part.num_rows) for part in parts)


def common(parts: Sequence[Any], name: str) -> tuple[Any, ...]:
    """Return the items that all parts have in a field, in the order of the first."""
    first, *others = map(dict.fromkeys, _values(parts, name))
    return tuple(item for item in first if all(item in values for values in others))


WORST = Rule(None)
TOTAL = Rule(lambda parts, name: sum(_values(parts, name)))
UNION = Rule(lambda parts, name: tuple(dict.fromkeys(item for value in _values(parts, name) for item in value)))
"""Each item once, in the order of the parts."""
COMMON = Rule(common)
"""Items that all parts have, in the order of the first."""
LARGEST = Rule(lambda parts, name: largest(_values(parts, name)))
SMALLEST = Rule(lambda parts, name: smallest(_values(parts, name)))
MEDIAN = Rule(_median)
"""The median of the medians, weighted by rows."""
MERGED = Rule(lambda parts, name: merged(values := list(_values(parts, name)), worst=values[0]))
"""By the rules of the field's own type."""
LARGEST_COMPUTED = Rule(lambda parts, name: largest(_values(_computed(parts), name)))
MEDIAN_COMPUTED = Rule(lambda parts, name: _median(_computed(parts), name))


@cache
def _rules(cls: type["DataclassInstance"]) -> Mapping[str, Rule]:
    hints, rules = get_type_hints(cls, include_extras=True), dict[str, Rule]()
    for field in fields(cls):
        named = [item for item in getattr(hints[field.name], "__metadata__", ()) if isinstance(item, Rule)]
        if len(named) != 1:
            what = f"{cls.__name__}.{field.name} names {len(named)} rules for merging, expected one"
            raise TypeError(f"{what}: write Annotated[TYPE, TOTAL], or another rule of {__name__}")
        rules[field.name] = named[0]
    return rules


def mergeable(cls: type[T]) -> type[T]:
    """Decorate a dataclass whose every field names its rule.

    Raises:
        TypeError: a field names none, or several.
    """
    _rules(cls)  # type: ignore[arg-type]
    return cls


def merged(parts: Sequence[D], *, worst: D) -> D:
    """Return the whole of some parts; `worst` is the one whose values stand for all where no rule combines them."""
    rules = _rules(type(worst)).items()
    return replace(worst, **{name: rule.merge(parts, name) for name, rule in rules if rule.merge is not None})
