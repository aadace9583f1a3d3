"""Explanation: the known ways to get an operation wrong, tried against the rows that are wrong."""

from harness.judge.explain.core.rerun import Budget
from harness.judge.explain.power import power_of
from harness.judge.explain.run import explain_run, wrong_operation

__all__ = ["Budget", "explain_run", "power_of", "wrong_operation"]
