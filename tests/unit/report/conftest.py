"""The fixture of all examples."""

import pytest

from harness.results import CheckResult

from .examples import NAMES, build


@pytest.fixture(params=NAMES)
def result(request: pytest.FixtureRequest) -> CheckResult:
    """Return each of the checks in turn."""
    return build(request.param)
