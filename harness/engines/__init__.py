"""Engines under test, each behind the same small Protocol."""

from harness.engines.adapter import Engine, Offer, Workload, engine_names, open_engine

__all__ = ["Engine", "Offer", "Workload", "engine_names", "open_engine"]
