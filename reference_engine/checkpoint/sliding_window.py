"""The layers that see only the latest tokens.

A window of W lets position i see positions i - W + 1 to i. Families say it differently: Mistral has one window for all
layers, Qwen a switch, a width, and the first layer that slides, Gemma how many layers there are to one that does not.
"""

from __future__ import annotations

from reference_engine.checkpoint.config_file import ConfigFields
from reference_engine.checkpoint.families import Family, Sliding
from reference_engine.errors import ConfigError, UnsupportedModelError

__all__ = ["layer_windows"]

FULL, SLIDING = "full_attention", "sliding_attention"
"""As config.json writes the types of layers."""
MISTRAL_WINDOW = 4096  # where config.json does not name one; null means none
GEMMA_WINDOW, GEMMA_PATTERN = 4096, 6
MAX_WINDOW_LAYERS = 28
MAX_LAYERS = 10_000  # a typing error must not become a list that fills the memory


def layer_windows(fields: ConfigFields, family: Family) -> tuple[int | None, ...]:
    """Return the window of each layer, None if it sees everything.

    Raises:
        ConfigError: the fields contradict each other.
        UnsupportedModelError: the family has no windows, and config.json asks for them.
    """
    num_layers = fields.positive_int("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise ConfigError(
            "num_hidden_layers is impossible", where=fields.where, expected=f"at most {MAX_LAYERS}", actual=num_layers
        )
    if family.delta_nets(fields):
        return (None,) * num_layers
    if family.sliding is Sliding.ALL_LAYERS:
        has_window = fields.values.get("sliding_window", MISTRAL_WINDOW) is not None
        return (fields.positive_int("sliding_window", MISTRAL_WINDOW) if has_window else None,) * num_layers
    if family.sliding is Sliding.BY_PATTERN:
        window: int | None = fields.positive_int("sliding_window", GEMMA_WINDOW)
        layer_types = _layer_types(fields, num_layers, _by_pattern(fields, num_layers))
        return tuple(window if layer_type == SLIDING else None for layer_type in layer_types)
    is_on = bool(fields.values.get("use_sliding_window")) and fields.values.get("sliding_window") is not None
    if is_on and family.sliding is Sliding.NEVER:
        raise UnsupportedModelError(
            "unsupported use_sliding_window", where=fields.where, expected="no layer of type sliding_attention",
            actual=f"sliding_window {fields.values['sliding_window']}",
        )  # fmt: skip
    window = fields.positive_int("sliding_window") if is_on else None
    layer_types = _layer_types(fields, num_layers, _from_first(fields, num_layers, is_on))
    if SLIDING in layer_types:
        if family.sliding is Sliding.NEVER:
            raise UnsupportedModelError(
                "unsupported layer_types", where=fields.where, expected="full_attention in every layer",
                actual=layer_types,
            )  # fmt: skip
        if window is None:
            raise ConfigError(
                "layers slide without a window", where=fields.where, expected="use_sliding_window and sliding_window",
                actual=layer_types,
            )  # fmt: skip
    return tuple(window if layer_type == SLIDING else None for layer_type in layer_types)


def _from_first(fields: ConfigFields, num_layers: int, is_on: bool) -> list[str]:
    """Return the types of layers of which all from a certain one on slide."""
    first = fields.positive_int("max_window_layers", MAX_WINDOW_LAYERS) if is_on else num_layers
    return [FULL if layer < first else SLIDING for layer in range(num_layers)]


def _by_pattern(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return the types of layers of which one in so many sees everything."""
    pattern = fields.positive_int("sliding_window_pattern", GEMMA_PATTERN)
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]


def _layer_types(fields: ConfigFields, num_layers: int, default: list[str]) -> list[str]:
    layer_types = fields.values.get("layer_types")
    if not layer_types:
        return default
    is_list = isinstance(layer_types, list)
    if not is_list or any(layer_type not in (FULL, SLIDING) for layer_type in layer_types):
        raise UnsupportedModelError(
            "unsupported layer_types", where=fields.where, expected="full_attention or sliding_attention",
            actual=layer_types,
        )  # fmt: skip
    if len(layer_types) != num_layers:
        raise ConfigError(
            "layer_types and num_hidden_layers differ", where=fields.where, expected=num_layers, actual=len(layer_types)
        )
    return list(layer_types)
