"""Names of taps: HF's dotted module paths, and the shorter names of schema 1 for what has no module of its own.

A tap is named by the path of the module whose output it is (`model.layers.3.self_attn.q_proj`), or by `PATH.input` for
what is computed between modules. Under a decoder layer some have a name of their own, in every family where they occur:
`.q_rope`, `.k_rope`, `.attention` (the context before the output projection), `.attn_residual`, `.mlp.act`
(act(gate) * up), `.output`, and the cache read back, `.k_cache` and `.v_cache`. The head is always `lm_head`.
"""

import re

EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm"
LOGITS = "lm_head"
FINAL_LOGITS = "logits"
"""The head's output after a soft cap or a scale, if the model has one."""

_IN_LAYER = re.compile(r"(?P<prefix>[A-Za-z_][\w.]*?\.(?P<layer>\d{1,4})\.)(?P<site>.+)", re.DOTALL | re.ASCII)


def layer_of(tap: str) -> int | None:
    """Return the number of the decoder layer that a tap belongs to; None outside of the layers."""
    found = _IN_LAYER.fullmatch(tap)
    return int(found["layer"]) if found else None


def site_of(tap: str) -> str:
    """Return the tap's name without its layer: `self_attn.q_proj` of `model.layers.3.self_attn.q_proj`."""
    found = _IN_LAYER.fullmatch(tap)
    return found["site"] if found else tap


def prefix_of(tap: str) -> str:
    """Return the prefix of the tap's layer, with its final dot; empty outside of the layers."""
    found = _IN_LAYER.fullmatch(tap)
    return found["prefix"] if found else ""


def layer_prefix(layer: int) -> str:
    """Return the prefix of the taps of a decoder layer in most of HF's families, with its final dot."""
    return f"model.layers.{layer}."
