"""Engines under test, each behind the same small Protocol."""

from harness.engines.adapter import (
    LIMITS,
    Capabilities,
    Control,
    Engine,
    SettingsShower,
    TapMatcher,
    Timeline,
    Workload,
    engine_errors,
    engine_names,
    installed_engine_names,
    is_foreign,
    open_engine,
    shown_settings,
)
from harness.results.check import TapSource
from harness.results.settings import ModelSettings

__all__ = [
    "LIMITS",
    "Capabilities",
    "Control",
    "Engine",
    "ModelSettings",
    "SettingsShower",
    "TapMatcher",
    "TapSource",
    "Timeline",
    "Workload",
    "engine_errors",
    "engine_names",
    "installed_engine_names",
    "is_foreign",
    "open_engine",
    "shown_settings",
]
