"""Metamorphic relations of a whole engine: ways to run the same requests that must not change the result."""

from harness.properties.engine.suite import check_engine, not_checked, refusal

__all__ = ["check_engine", "not_checked", "refusal"]
