"""Comparison: align rows, measure them, judge each operation, and find the first that is wrong."""

from harness.judge.compare.coverage import Requirements
from harness.judge.compare.run import TOKENS, Comparison, compare_run

__all__ = ["TOKENS", "Comparison", "Requirements", "compare_run"]
