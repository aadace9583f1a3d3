"""Comparison: align rows, measure them, judge each operation, and find the first that is wrong."""

from harness.compare.run import compare_run

__all__ = ["compare_run"]
