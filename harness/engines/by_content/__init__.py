"""Engines without an adapter: what a tensor is, is found by what it holds."""

from harness.engines.by_content.step_engine import StepEngine
from harness.engines.by_content.steps import module_paths

__all__ = ["StepEngine", "module_paths"]
