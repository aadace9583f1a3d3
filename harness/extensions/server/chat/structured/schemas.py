"""JSON schemas, and how they are generated: what every library of masks takes."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

_KEYS = ("a", "b", "name", "x y", "\u00e9")
_CONSTANTS = ("", "a", "a b", "\u00e9", 0, -1, 10, True, None)
"""None with an escape: libraries differ in whether a constant may be written with another one."""


def schemas() -> SearchStrategy[dict[str, Any]]:
    """Return a strategy for schemas of objects: all properties required, no others."""
    leaves: SearchStrategy[dict[str, Any]] = st.sampled_from(
        [{"type": own} for own in ("string", "integer", "number", "boolean", "null")]
    ) | st.lists(st.sampled_from(_CONSTANTS), min_size=1, max_size=3, unique_by=repr).map(lambda own: {"enum": own})
    nested = st.recursive(leaves, _nested, max_leaves=4)
    return st.dictionaries(st.sampled_from(_KEYS), nested, min_size=1, max_size=3).map(object_of)


def _nested(inner: SearchStrategy[dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda own: {"type": "array", "items": own[0], "minItems": own[1], "maxItems": own[1] + own[2]}
    )
    objects = st.dictionaries(st.sampled_from(_KEYS), inner, min_size=1, max_size=2).map(object_of)
    return arrays | objects | st.lists(inner, min_size=2, max_size=2).map(lambda own: {"anyOf": own})


def object_of(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties} | required
