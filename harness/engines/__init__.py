"""Engines under test, each behind the same small Protocol."""

from harness.engines.adapter import (
    LIMITS,
    Capabilities,
    Control,
    Engine,
    TapMatcher,
    TapSource,
    Timeline,
    Workload,
    engine_errors,
    engine_names,
    is_foreign,
    open_engine,
)

__all__ = [
    "LIMITS",
    "Capabilities",
    "Control",
    "Engine",
    "TapMatcher",
    "TapSource",
    "Timeline",
    "Workload",
    "engine_errors",
    "engine_names",
    "is_foreign",
    "open_engine",
]
