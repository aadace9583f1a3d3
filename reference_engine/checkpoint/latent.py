"""Multi-head latent attention in the place of plain attention: its sizes, and what a checkpoint holds of it.

Shapes: D hidden, N heads, Q latent of the queries, L latent of keys and values, P plain and R rotated part of a head,
H value head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reference_engine.checkpoint.config_file import ConfigFields
from reference_engine.checkpoint.placement import Placement, stacked
from reference_engine.errors import UnsupportedModelError

__all__ = ["LatentShape", "deepseek_v3_latent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """The sizes of latent attention, the same in all layers (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

    num_heads: int
    query_rank: int | None
    """Width of the latent that queries are made from; None: they are made from the hidden state."""
    rank: int
    """Width of the latent that keys and values are made from."""
    plain_dim: int
    """Of each query and key head, the part that is not rotated."""
    rotary_dim: int
    """The part that is; the keys of all heads share theirs."""
    value_dim: int
    """Width of a value head."""
    has_bias: bool
    """Whether the products that make latents, and the output projection, have a bias."""
    is_interleaved: bool
    """Whether neighbours are rotated together, rather than elements half a head apart."""

    @property
    def head_dim(self) -> int:
        """Width of a query or key head."""
        return self.plain_dim + self.rotary_dim

    @property
    def cached_dim(self) -> int:
        """Numbers that the cache keeps of a token: its latent, and the rotated part of its key."""
        return self.rank + self.rotary_dim

    def tensors(self, prefix: str, hidden_size: int) -> Iterator[tuple[str, Placement]]:
        """Yield the checkpoint's tensors of one layer and their places; `prefix` starts their names."""
        attention, num_q, rank = f"{prefix}self_attn.", self.num_heads * self.head_dim, self.query_rank
        if rank is None:
            yield from stacked(attention, "q_proj", {"q_proj": num_q}, hidden_size)
        else:
            yield from stacked(attention, "q_a_proj", {"q_a_proj": rank}, hidden_size, self.has_bias)
            yield f"{attention}q_a_layernorm.weight", Placement(f"{attention}q_a_layernorm.weight", (rank,))
            yield from stacked(attention, "q_b_proj", {"q_b_proj": num_q}, rank)
        latent = {"kv_a_proj_with_mqa": self.cached_dim}
        yield from stacked(attention, "kv_a_proj_with_mqa", latent, hidden_size, self.has_bias)
        yield f"{attention}kv_a_layernorm.weight", Placement(f"{attention}kv_a_layernorm.weight", (self.rank,))
        expanded = {"kv_b_proj": self.num_heads * (self.plain_dim + self.value_dim)}
        yield from stacked(attention, "kv_b_proj", expanded, self.rank)
        yield from stacked(attention, "o_proj", {"o_proj": hidden_size}, self.num_heads * self.value_dim, self.has_bias)


def deepseek_v3_latent(fields: ConfigFields) -> LatentShape:
    """Read the latent attention of all layers.

    Raises:
        ConfigError: a field is impossible.
        UnsupportedModelError: heads share keys beyond the rotated part.
    """
    num_heads = fields.positive_int("num_attention_heads")
    num_kv_heads = fields.positive_int("num_key_value_heads", num_heads)
    if num_kv_heads != num_heads:
        raise UnsupportedModelError(
            "unsupported num_key_value_heads with latent attention", where=fields.where,
            expected=f"num_attention_heads = {num_heads}", actual=num_kv_heads,
        )  # fmt: skip
    is_null = "q_lora_rank" in fields.values and fields.values["q_lora_rank"] is None
    return LatentShape(
        num_heads=num_heads,
        query_rank=None if is_null else fields.positive_int("q_lora_rank", 1536),
        rank=fields.positive_int("kv_lora_rank", 512),
        plain_dim=fields.positive_int("qk_nope_head_dim", 128),
        rotary_dim=fields.positive_int("qk_rope_head_dim", 64),
        value_dim=fields.positive_int("v_head_dim", 128),
        has_bias=fields.boolean("attention_bias", default=False),
        is_interleaved=fields.boolean("rope_interleave", default=True),
    )
