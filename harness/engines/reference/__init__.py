"""The reference engine under test: the one place of the core where the harness imports it."""

from harness.engines.reference.engine import open_engine

__all__ = ["open_engine"]
