"""Invariants of a scheduler, and those of the blocks behind it."""

from harness.properties.scheduler.suite import not_checked, search_scheduler

__all__ = ["not_checked", "search_scheduler"]
