"""A correctness and profiling harness for LLM inference engines.

Importing this package imports neither torch nor transformers: the pytest plugin must cost nothing until a case runs.
"""

from harness.version import __version__

__all__ = ["__version__"]
