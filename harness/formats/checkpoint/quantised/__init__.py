"""Quantised checkpoints as servers load them: read by our own readers, dequantised for HF's architecture."""

from harness.formats.checkpoint.quantised.folder import (
    QuantisedSource,
    cache_scales,
    checkpoint_of_quantised,
    is_quantised,
    read_quantised_source,
    served_folder,
)

__all__ = [
    "QuantisedSource",
    "cache_scales",
    "checkpoint_of_quantised",
    "is_quantised",
    "read_quantised_source",
    "served_folder",
]
