"""Engines under test, each behind the same small Protocol."""

from typing import Never

from harness.engines.adapter import (
    LIMITS,
    RENAMED,
    Capabilities,
    Control,
    Engine,
    TapMatcher,
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
    "Timeline",
    "Workload",
    "engine_errors",
    "engine_names",
    "is_foreign",
    "open_engine",
]


def __getattr__(name: str) -> Never:
    if name == "Offer":
        raise ImportError(f"harness.engines.Offer is Capabilities now: {RENAMED}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
