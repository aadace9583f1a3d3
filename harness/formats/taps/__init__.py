"""Intermediate tensors of a model: their names, what computes them, and how each kind of operation is judged."""

from harness.formats.taps.graph import Graph, Operation, graph_of_taps
from harness.formats.taps.kinds import KINDS, ErrorModel, Kind, KindTraits
from harness.formats.taps.names import EMBEDDING, FINAL_NORM, LOGITS, layer_of, layer_prefix, prefix_of, site_of

__all__ = [
    "EMBEDDING",
    "FINAL_NORM",
    "KINDS",
    "LOGITS",
    "ErrorModel",
    "Graph",
    "Kind",
    "KindTraits",
    "Operation",
    "graph_of_taps",
    "layer_of",
    "layer_prefix",
    "prefix_of",
    "site_of",
]
