"""Fixtures of the command line, of models and of engines, as the core's tests have them."""

from ..integration.commands import changed, golden, harness, install, llama, recording, url, workload
from ..unit.engines.conftest import record
from ..unit.families import fused, tiny, tiny_folder
from ..unit.profiling.conftest import load, open_on, reference

__all__ = [
    "changed", "fused", "golden", "harness", "install", "llama", "load", "open_on", "record", "recording", "reference",
    "tiny", "tiny_folder", "url", "workload",
]  # fmt: skip
