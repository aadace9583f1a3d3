"""Invariants of the state cache that `--state-cache` names."""

from collections.abc import Mapping
from typing import Any

from hypothesis import settings

from harness.properties.states.suite import not_checked, search_state_cache


def test_state_cache(
    state_cache: Any, property_settings: settings, accepted_invariants: Mapping[int, str], suite_record: Any
) -> None:
    """No sequence of calls breaks an invariant."""
    suite_record.add_not_checked(not_checked(state_cache))
    report = search_state_cache(state_cache, property_settings)
    suite_record.add_not_checked(report.not_checked)
    suite_record.add_search("state cache", report)
    report.raise_findings(accepted_invariants)
