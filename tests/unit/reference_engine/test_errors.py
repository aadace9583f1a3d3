from __future__ import annotations

import pytest

from reference_engine import errors
from reference_engine.errors import EngineError


def test_message_says_what_where_expected_actual_and_what_next() -> None:
    error = EngineError("bad size", where="config.json", expected="at least 1", actual=0, hint="Raise it.")
    assert str(error) == "bad size, in config.json: expected at least 1, found 0. Raise it."


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "bad."),
        ({"where": "x"}, "bad, in x."),
        ({"actual": 3}, "bad: found 3."),
        ({"expected": 2, "actual": 0}, "bad: expected 2, found 0."),
    ],
)
def test_absent_parts_leave_no_trace(parts: dict[str, object], message: str) -> None:
    assert str(EngineError("bad", **parts)) == message


def test_every_error_has_the_one_base() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), EngineError)
