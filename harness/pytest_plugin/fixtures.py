"""Fixtures for tests in Python."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from harness.errors import Code, HarnessError

if TYPE_CHECKING:
    from harness.api import CheckReport


_CALLS = pytest.StashKey[Counter[str]]()
"""How often a test has called the fixture, and how often the check passed."""


class NothingCheckedWarning(pytest.PytestWarning):
    """A test has the fixture, and passes without calling it."""


class FailureCaughtWarning(pytest.PytestWarning):
    """A test passes though a check in it did not: the test caught its exception."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Warn of a passing test whose checks did not pass, or that checks nothing."""
    result = yield
    calls = pyfuncitem.stash.get(_CALLS, None)
    if calls is not None and not calls["called"]:
        warnings.warn(NothingCheckedWarning(f"{pyfuncitem.nodeid} never calls harness_check"), stacklevel=1)
    elif calls is not None and calls["passed"] < calls["called"]:
        what = f"{calls['called'] - calls['passed']} of its {calls['called']} calls of harness_check did not pass"
        warnings.warn(FailureCaughtWarning(f"{pyfuncitem.nodeid} passes, though {what}"), stacklevel=1)
    return result


@pytest.fixture
def harness_check(request: pytest.FixtureRequest) -> "Callable[..., CheckReport]":
    """Return `harness.check`, made to fail the test where the check does not pass.

    The figures of each check are properties of the test in a JUnit file. A test whose device is not there is skipped.
    """
    calls = request.node.stash.setdefault(_CALLS, Counter())

    def check(engine: Any = "reference", **arguments: Any) -> "CheckReport":
        """Check an engine as `harness.check` does, assert the report, and return it."""
        calls["called"] += 1
        __tracebackhide__ = True
        from harness.report.check.json import check_properties

        result = _checked(engine, arguments)
        if isinstance(result, HarnessError):
            if result.code is Code.NO_DEVICE:
                pytest.skip(f"{result.code}: {result.what} ({result.actual})")
            raise result  # the engine's own error stays the cause
        request.node.user_properties += check_properties(result)
        result.assert_ok()
        calls["passed"] += 1
        return result

    return check


def _checked(engine: Any, arguments: Mapping[str, Any]) -> "CheckReport | HarnessError":
    """Return the report, or the error without the harness's own frames."""
    import harness

    try:
        return harness.check(engine, **arguments)
    except HarnessError as error:
        return error if os.environ.get("HARNESS_TRACEBACK") else error.with_traceback(None)
