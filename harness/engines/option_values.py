"""Values of `--engine-option NAME=VALUE`, which are text."""

from typing import Any

from harness.base.files import parse_json
from harness.errors import Code, HarnessError

_PYTHON = {"True": True, "False": False, "None": None}


def parse_flag(name: str, text: str) -> bool:
    """Return whether an option is on.

    Raises:
        HarnessError: BAD_OPTION: it is neither `true` nor `false`.
    """
    if text not in ("true", "false"):
        what = f"{name} must be true or false"
        raise HarnessError(Code.BAD_OPTION, what, where="--engine-option", expected="true or false", actual=text)
    return text == "true"


def parse_value(text: str) -> Any:
    """Return what a text says as JSON, or as Python's True, False or None; the text itself if it says neither."""
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        return parse_json(text)
    except ValueError:
        return text
