"""Gated delta nets in the place of attention: their sizes, and what a checkpoint holds of them.

Shapes: D hidden, G query and key heads, N value heads, A query and key head dim, H value head dim, W kernel width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from reference_engine.checkpoint.config_file import ConfigFields
from reference_engine.checkpoint.placement import Placement, stacked
from reference_engine.errors import ConfigError

__all__ = ["DeltaNetShape", "qwen3_next_delta_nets"]

_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetShape:
    """The sizes of one gated delta net."""

    num_key_heads: int
    """Of queries and keys alike."""
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    """Latest tokens that the convolution sees, its own included."""

    @property
    def key_size(self) -> int:
        """Width of the queries, and of the keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Width of the values, and of their gates."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    def tensors(self, prefix: str, hidden_size: int) -> Iterator[tuple[str, Placement]]:
        """Yield the checkpoint's tensors of one layer and their places; `prefix` starts their names."""
        mixer = f"{prefix}linear_attn."
        yield from stacked(mixer, "in_proj_qkvz", {"in_proj_qkvz": self.conv_size + self.value_size}, hidden_size)
        yield from stacked(mixer, "in_proj_ba", {"in_proj_ba": 2 * self.num_value_heads}, hidden_size)
        yield from stacked(mixer, "out_proj", {"out_proj": hidden_size}, self.value_size)
        shapes = {
            "conv1d.weight": (self.conv_size, 1, self.kernel_size),
            "dt_bias": (self.num_value_heads,),
            "A_log": (self.num_value_heads,),
            "norm.weight": (self.value_head_dim,),
        }
        for name, shape in shapes.items():
            yield mixer + name, Placement(mixer + name, shape)


def qwen3_next_delta_nets(fields: ConfigFields) -> Mapping[int, DeltaNetShape]:
    """Read the gated delta net of each layer that has one.

    Raises:
        ConfigError: a field is missing or impossible.
    """
    num_layers = fields.positive_int("num_hidden_layers")
    interval = fields.positive_int("full_attention_interval", 4)
    by_interval = [_KINDS[(layer + 1) % interval == 0] for layer in range(num_layers)]
    kinds = fields.values.get("layer_types") or by_interval
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(_KINDS):
        raise ConfigError(
            "layer_types is impossible", where=fields.where, expected=f"{num_layers} of {', '.join(_KINDS)}",
            actual=repr(kinds)[:120],
        )  # fmt: skip
    shape = DeltaNetShape(
        num_key_heads=fields.positive_int("linear_num_key_heads", 16),
        num_value_heads=fields.positive_int("linear_num_value_heads", 32),
        key_head_dim=fields.positive_int("linear_key_head_dim", 128),
        value_head_dim=fields.positive_int("linear_value_head_dim", 128),
        kernel_size=fields.positive_int("linear_conv_kernel_dim", 4),
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise ConfigError(
            "value heads do not divide among the key heads", where=fields.where,
            expected=f"linear_num_value_heads a multiple of linear_num_key_heads = {shape.num_key_heads}",
            actual=shape.num_value_heads,
        )  # fmt: skip
    return {layer: shape for layer, kind in enumerate(kinds) if kind == "linear_attention"}
