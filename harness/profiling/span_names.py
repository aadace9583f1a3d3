"""Names of the spans in a trace: what writes and what reads them agree here, and reading needs no torch."""

import re

STEP = "engine.step"
"""Span of a whole step, inside of the annotation that carries its shape: the annotation's own cost, some 40 us at
either end, is left out of it."""
SPAN = re.compile(r"(?:(?:engine|model)\.[\w.]+|lm_head)$")
"""Names of the spans: annotations in a trace of now, of the same category as operators in one of before."""


def layer_of(name: str) -> str | None:
    """Return `model.layers.3` of `model.layers.3.mlp.act`, and None for what is in no layer."""
    parts = name.split(".", 3)
    return ".".join(parts[:3]) if len(parts) == 4 and parts[:2] == ["model", "layers"] else None


def site_of(name: str) -> str:
    """Return `mlp.act` of `model.layers.3.mlp.act`, and the name itself of what is in no layer."""
    layer = layer_of(name)
    return name if layer is None else name.removeprefix(f"{layer}.")
