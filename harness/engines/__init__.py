"""Engines under test, each behind the same small Protocol."""

from harness.engines.adapter import (
    LIMITS,
    Control,
    Engine,
    Offer,
    Timeline,
    Workload,
    blaming,
    engine_names,
    open_engine,
)

__all__ = [
    "LIMITS",
    "Control",
    "Engine",
    "Offer",
    "Timeline",
    "Workload",
    "blaming",
    "engine_names",
    "open_engine",
]
