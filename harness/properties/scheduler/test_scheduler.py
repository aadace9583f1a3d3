"""Invariants 19 to 25 of the scheduler that `--scheduler` names, and those of its blocks."""

from collections.abc import Mapping
from typing import Any

from hypothesis import settings

from harness.properties.scheduler.suite import not_checked, search_scheduler


def test_scheduler(
    scheduler: Any, property_settings: settings, accepted_invariants: Mapping[int, str], suite_record: Any
) -> None:
    """No sequence of arrivals, steps and ends breaks an invariant."""
    suite_record.add_not_checked(not_checked(scheduler))
    report = search_scheduler(scheduler, property_settings, accepted=accepted_invariants)
    suite_record.add_search("scheduler", report)
    report.raise_findings(accepted_invariants)
