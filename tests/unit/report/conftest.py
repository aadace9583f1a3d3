"""All examples in turn, and a browser to look at pages with."""

from collections.abc import Iterator

import pytest

from harness.results.check import CheckResult

from .browser import CHROMIUM, Browser
from .examples import NAMES, build


@pytest.fixture(params=NAMES)
def result(request: pytest.FixtureRequest) -> CheckResult:
    """Return each of the checks in turn."""
    return build(request.param)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Open a browser without a window."""
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened
