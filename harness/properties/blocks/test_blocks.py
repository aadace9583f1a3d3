"""Invariants 1 to 18 of the block manager that `--block-manager` names."""

from collections.abc import Mapping
from typing import Any

from hypothesis import settings

from harness.properties.blocks.suite import not_checked, search_block_manager


def test_block_manager(
    block_manager: Any, property_settings: settings, accepted_invariants: Mapping[int, str], suite_record: Any
) -> None:
    """No sequence of calls breaks an invariant."""
    suite_record.add_not_checked(not_checked(block_manager))
    report = search_block_manager(block_manager, property_settings)
    suite_record.add_not_checked(report.not_checked)
    suite_record.add_search("block manager", report)
    report.raise_findings(accepted_invariants)
