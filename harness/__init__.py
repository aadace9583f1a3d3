"""A correctness and profiling harness for LLM inference engines.

Importing this package imports neither torch nor transformers: the pytest plugin must cost nothing until a case runs.
"""

__version__ = "0.1.0"
