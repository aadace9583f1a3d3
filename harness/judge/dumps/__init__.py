"""Two folders of tensors without a model: which tensors are the same quantity, and where they begin to differ."""

from harness.judge.dumps.run import CLOSE, compare_dumps

__all__ = ["CLOSE", "compare_dumps"]
