"""Invariants 19 to 25 of the scheduler that `--scheduler` names."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from harness.properties.scheduler.suite import check_scheduler, not_checked


def test_scheduler(scheduler: Callable[..., Any], property_settings: settings, request: pytest.FixtureRequest) -> None:
    """No sequence of arrivals, steps and ends breaks an invariant."""
    request.node.user_properties += [("not checked", line) for line in not_checked(scheduler)]
    check_scheduler(scheduler, property_settings)
