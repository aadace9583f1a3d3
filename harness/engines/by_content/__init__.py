"""Engines without an adapter: what a tensor is, is found by what it holds."""

from harness.engines.by_content.step_engine import StepEngine, module_paths

__all__ = ["StepEngine", "module_paths"]
