"""Engines under test, each behind the same small Protocol."""

from harness.engines.adapter import (
    Engine,
    Offer,
    TapMatcher,
    Workload,
    blaming,
    engine_names,
    is_foreign,
    open_engine,
)

__all__ = ["Engine", "Offer", "TapMatcher", "Workload", "blaming", "engine_names", "is_foreign", "open_engine"]
