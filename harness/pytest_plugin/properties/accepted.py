"""Broken invariants that are known and accepted, each with a reason: `--allow "21,15: reason"`."""

from collections.abc import Iterable, Mapping

import pytest

__all__ = ["accepted_invariants", "parse_accepted"]

EXPECTED = 'expected numbers and a reason, as in --allow "21,15: the frontend refuses such requests"'


def parse_accepted(texts: Iterable[str]) -> dict[int, str]:
    """Return the reason for each accepted invariant.

    Raises:
        pytest.UsageError: there is no reason, or no such invariant.
    """
    from harness.properties.core.invariants import Invariant

    accepted = {}
    for text in texts:
        numbers, _, reason = text.partition(":")
        if not reason.strip():
            raise pytest.UsageError(f"--allow {text!r} gives no reason; {EXPECTED}")
        for number in numbers.split(","):
            if not number.strip().isdecimal() or int(number) not in set(Invariant):
                raise pytest.UsageError(
                    f"--allow {text!r}: {number.strip()!r} is no invariant (1 to {max(Invariant)}); {EXPECTED}"
                )
            accepted[int(number)] = reason.strip()
    return accepted


@pytest.fixture(scope="session")
def accepted_invariants(request: pytest.FixtureRequest) -> Mapping[int, str]:
    """Return the reason for each invariant that `--allow` names."""
    return parse_accepted(request.config.getoption("accepted_invariants"))
