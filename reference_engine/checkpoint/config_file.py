"""Reading JSON of unknown origin: every value is checked before it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_engine.errors import ConfigError

__all__ = ["ConfigFields", "read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: the file is missing, cannot be read, is not JSON, or is not an object.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path.name} is missing", where=path.parent, hint="Give the folder of a HuggingFace checkpoint."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read as JSON: {error}", where=path) from error
    if not isinstance(content, dict):
        raise ConfigError("not a JSON object", where=path, expected="an object", actual=type(content).__name__)
    return content


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The values of a config file, taken out one by one; `where` names the file in errors."""

    values: Mapping[str, Any]
    where: str

    def positive_int(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Take an integer above zero, or of at least `least`; `null` counts as absent.

        Raises:
            ConfigError: the field is absent without a default, or is something else.
        """
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            expected = f"an integer above {least - 1}"
            raise ConfigError(f"{name} is impossible", where=self.where, expected=expected, actual=repr(value))
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Take a finite number above zero; the errors are those of `positive_int`."""
        value = self._get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise ConfigError(
                f"{name} is impossible", where=self.where, expected="a number above 0", actual=repr(value)
            )
        return float(value)

    def numbers(self, name: str, count: int) -> list[float]:
        """Take a list of so many finite numbers above zero; the errors are those of `positive_int`."""
        values = self._get(name, None)
        if not isinstance(values, list) or len(values) != count:
            expected = f"a list of {count} numbers above 0"
            raise ConfigError(f"{name} is impossible", where=self.where, expected=expected, actual=repr(values))
        return [ConfigFields({name: value}, self.where).number(name) for value in values]

    def boolean(self, name: str, default: bool) -> bool:
        """Take `true` or `false`; the errors are those of `positive_int`."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is impossible", where=self.where, expected="true or false", actual=repr(value))
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{name} is missing", where=self.where)
        return value
