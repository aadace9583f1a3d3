"""Engines without an adapter: the content of a tensor says which of HF's values it is."""

from harness.engines.by_content.step_engine import StepEngine
from harness.engines.by_content.steps import module_paths

__all__ = ["StepEngine", "module_paths"]
