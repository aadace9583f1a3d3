"""The cache that HF makes for a model by default."""

import inspect
from contextlib import suppress

from transformers import DynamicCache

from harness.oracle.untraced import UntracedModel


def new_cache(hf: UntracedModel) -> DynamicCache | None:
    """Return an empty cache; None for a family without one, or with one of its own, which it makes itself."""
    takes_cache = "past_key_values" in inspect.signature(hf.model.forward).parameters
    if takes_cache and hf.model._supports_default_dynamic_cache():
        with suppress(Exception):  # settings that HF's own cache does not know
            return DynamicCache(config=hf.config)
    return None


def cache_windows(hf: UntracedModel) -> dict[int, int]:
    """Return how many of the latest rows suffice to go on, by layer; without the layers that keep all rows."""
    windows = {
        at: getattr(layer, "sliding_window", None) for at, layer in enumerate(getattr(new_cache(hf), "layers", ()))
    }
    return {at: window for at, window in windows.items() if isinstance(window, int)}
