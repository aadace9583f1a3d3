"""Options of the reference engine as text, and as the types of its `EngineConfig`."""

from collections.abc import Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from harness.engines.adapter import parse_flag, refuse_unknown_options
from harness.errors import Code, HarnessError
from reference_engine import EngineConfig

_GIVEN_OTHERWISE = ("dtype", "device", "kv_cache_scales")


def parse_reference_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the options with values of the types that the fields of `EngineConfig` have.

    Raises:
        HarnessError: BAD_OPTION: there is no such field, or its value has another type.
    """
    known = [field.name for field in fields(EngineConfig) if field.name not in _GIVEN_OTHERWISE]
    refuse_unknown_options("reference", options, known)
    hints = get_type_hints(EngineConfig)
    return {name: _parsed(name, text, hints[name]) for name, text in options.items()}


def _parsed(name: str, text: str, hint: Any) -> Any:
    kinds = set(get_args(hint) or (hint,)) - {NoneType}
    if kinds == {bool}:
        return parse_flag(name, text)
    return _integer(name, text) if kinds == {int} else text


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        what = f"{name} must be an integer"
        raise HarnessError(Code.BAD_OPTION, what, where="--engine-option", actual=text) from None
