"""One record of a log: its fields under any of their names, each checked for what it must hold."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.rollout.format.names import SAMPLING, names_of
from harness.extensions.rollout.format.row import Sampling

_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-3, 1e3
_SOUND: dict[str, Callable[[float], bool]] = {
    "temperature": lambda x: _LEAST_TEMPERATURE <= x <= _MOST_TEMPERATURE,
    "top_p": lambda x: 0 < x <= 1,
    "min_p": lambda x: 0 <= x < 1,
    "top_k": lambda x: math.isfinite(x) and x == int(x),
}
_SOUND_TEXT = "temperature 0.001 to 1000, 0 < top_p <= 1, 0 <= min_p < 1, a whole top_k"


@dataclass(frozen=True, slots=True)
class Record:
    """One record."""

    fields: Mapping[str, Any]
    where: str

    def find(self, field: str) -> Any:
        """Return a field's value; None if the record has none."""
        name = self.name_of(field)
        return None if name is None else self.fields[name]

    def name_of(self, field: str) -> str | None:
        """Return the name that the record has for a field."""
        return next((name for name in names_of(field) if self.fields.get(name) is not None), None)

    def entries(self, field: str) -> list[Any] | None:
        """Return a field that must be a list.

        Raises:
            HarnessError: ROLLOUT_MISALIGNED.
        """
        values = self.find(field)
        if values is not None and not isinstance(values, list):
            raise self.misaligned(f"{self.name_of(field)} is no list", "one entry a token", repr(values)[:60])
        return values

    def column(self, field: str, num_tokens: int, lengths: Collection[int]) -> list[Any] | None:
        """Return a field with one entry a token; a shorter field stands at the last tokens, with None before it.

        Raises:
            HarnessError: ROLLOUT_MISALIGNED: the field has none of these lengths.
        """
        values = self.entries(field)
        if values is None:
            return None
        if len(values) not in lengths:
            expected = " or ".join(map(str, sorted(lengths))) if len(lengths) < 4 else f"at most {num_tokens}"
            raise self.misaligned(f"{self.name_of(field)} does not fit the tokens", f"{expected} entries", len(values))
        return [*[None] * (num_tokens - len(values)), *values]

    def mask(self, field: str, num_tokens: int, lengths: Collection[int]) -> list[bool] | None:
        """Return a column of zeros and ones.

        Raises:
            HarnessError: ROLLOUT_MISALIGNED.
        """
        values = self.entries(field) or []
        odd = next((value for value in values if not isinstance(value, int | float) or value not in (0, 1)), 0)
        if odd != 0:
            raise self.misaligned(f"{self.name_of(field)} is no mask", "0 or 1 for each token", repr(odd)[:60])
        column = self.column(field, num_tokens, lengths)
        return None if column is None else [bool(value) for value in column]

    def sampling(self) -> Sampling:
        """Return the sampling parameters, which stand in an object of their own or in the record itself.

        Raises:
            HarnessError: ROLLOUT_MISALIGNED.
        """
        own = self.find("sampling")
        if own is not None and not isinstance(own, dict):
            raise self.misaligned(f"{self.name_of('sampling')} is no object", "parameters by name", repr(own)[:60])
        given = {**(own or {}), **self.fields}
        values = {name: given[name] for name in SAMPLING if given.get(name) is not None}
        for name, value in values.items():
            number = as_number(value)
            if number is None or not _SOUND[name](number):
                raise self.misaligned(f"{name} of the sampling makes no sense", _SOUND_TEXT, repr(value)[:60])
        if "top_k" in values:
            values["top_k"] = max(0, int(values["top_k"]))  # -1 means all tokens, as 0 does
        return Sampling(**values)

    def versions(self) -> tuple[str, ...]:
        """Return the versions of the weights that the record names, of either side."""
        found: list[Any] = []
        for field in ("weight_version", "trainer_version"):
            value = self.find(field)
            found += value if isinstance(value, list) else [] if value is None else [value]
        return tuple(sorted(set(map(str, found))))

    def misaligned(self, what: str, expected: object, actual: object) -> HarnessError:
        """Return the error of a column that does not fit."""
        hint = "docs/rollouts.md says how columns are aligned"
        return HarnessError(
            Code.ROLLOUT_MISALIGNED, what, where=self.where, expected=expected, actual=actual, hint=hint
        )

    def without_tokens(self, what: str, expected: str, actual: object) -> HarnessError:
        """Return the error of a row without tokens or log probabilities."""
        hint = "docs/rollouts.md has a table of the fields' names"
        return HarnessError(
            Code.ROLLOUT_WITHOUT_TOKENS, what, where=self.where, expected=expected, actual=actual, hint=hint
        )


def as_number(value: Any) -> float | None:
    """Return a number as a float; None for anything else, and for an integer that no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
