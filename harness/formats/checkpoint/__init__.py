"""Checkpoints on disk: found by their names, opened once, and handed on as one object."""

from harness.formats.checkpoint.cache import cache_dir, embedded_cases
from harness.formats.checkpoint.checkpoint import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME, Checkpoint
from harness.formats.checkpoint.locate import embedded_model, resolve
from harness.formats.checkpoint.tokenizer import HFTokenizer

__all__ = [
    "CONFIG_NAME",
    "INDEX_NAME",
    "WEIGHTS_NAME",
    "Checkpoint",
    "HFTokenizer",
    "cache_dir",
    "embedded_cases",
    "embedded_model",
    "resolve",
]
