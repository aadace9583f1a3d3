"""llama.cpp as an engine under test: all taps by its evaluation callback, its cache read back.

harness check --engine llamacpp --model FILE.gguf --prompt "..."
"""

from harness.extensions.llamacpp.engine.engine import open_engine

__all__ = ["open_engine"]
