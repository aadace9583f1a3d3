"""Explanation: the known ways to get an operation wrong, tried against the rows that are wrong."""

from harness.judge.explain.run import explain_run, wrong_operation

__all__ = ["explain_run", "wrong_operation"]
