"""The fixtures of the command line's tests, for the commands of extensions."""

from ..integration.conftest import changed, golden, harness, install, llama, recording, url, workload
from ..unit.conftest import tiny_folder

__all__ = ["changed", "golden", "harness", "install", "llama", "recording", "tiny_folder", "url", "workload"]
