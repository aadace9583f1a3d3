"""Results for programs: plain dicts, lists, strings and finite numbers, with keys that are always there.

NaN and the infinities are no JSON: they are the strings "nan", "inf" and "-inf". What was not measured is null.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

SCHEMA_VERSION = 1
_KEYS = {"outcome": "verdict"}
"""Keys of properties whose names differ."""


def document(result: object) -> dict[str, Any]:
    """Return a result with all of its fields, and the properties that its `IN_DOCUMENT` names."""
    return {"schema_version": SCHEMA_VERSION, **plain(result)}


def files_document(results: Sequence[object]) -> dict[str, Any]:
    """Return the results of several files."""
    return {"schema_version": SCHEMA_VERSION, "files": plain(results)}


def plain(value: Any) -> Any:
    """Return dataclasses, tuples and enums as what JSON has for them."""
    if is_dataclass(value):
        properties = {_KEYS.get(name, name): name for name in getattr(value, "IN_DOCUMENT", ())}
        named = {**properties, **{field.name: field.name for field in fields(value)}}
        return {key: plain(getattr(value, name)) for key, name in named.items()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return str(value) if isinstance(value, str) else value
