"""GGUF files as checkpoints: read, dequantised into HuggingFace's architecture, written for tests."""

from harness.extensions.llamacpp.gguf.folder import GGUFSource, checkpoint_of_gguf, read_source
from harness.extensions.llamacpp.gguf.header import GGUFHeader, GGUFTensor, read_gguf_header
from harness.extensions.llamacpp.gguf.model import GGUFModel, is_gguf, open_gguf

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
