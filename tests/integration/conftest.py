"""Fixtures of the command line; those of extensions have them too."""

from .commands import changed, engine, golden, harness, install, llama, recording, url, workload

__all__ = ["changed", "engine", "golden", "harness", "install", "llama", "recording", "url", "workload"]
