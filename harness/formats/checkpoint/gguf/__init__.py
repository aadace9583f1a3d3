"""GGUF files as checkpoints: read, dequantised into HuggingFace's architecture, written for tests."""

from harness.formats.checkpoint.gguf.folder import GGUFSource, checkpoint_of_gguf, read_source
from harness.formats.checkpoint.gguf.header import GGUFHeader, GGUFTensor, read_gguf_header
from harness.formats.checkpoint.gguf.model import GGUFModel, is_gguf, open_gguf

__all__ = [
    "GGUFHeader",
    "GGUFModel",
    "GGUFSource",
    "GGUFTensor",
    "checkpoint_of_gguf",
    "is_gguf",
    "open_gguf",
    "read_gguf_header",
    "read_source",
]
