"""Mistakes that nobody wrote down: HF's own source with one expression changed, run again on the engine's rows."""

from harness.judge.explain.edits.run import likely_mistakes, other_code

__all__ = ["likely_mistakes", "other_code"]
