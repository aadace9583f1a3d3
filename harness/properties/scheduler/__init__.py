"""Invariants of a scheduler, and those of the blocks behind it."""

from harness.properties.scheduler.suite import check_scheduler, not_checked, search_scheduler

__all__ = ["check_scheduler", "not_checked", "search_scheduler"]
