"""Conditions of coverage that depend on the model as much as on the workload."""

from dataclasses import dataclass

from harness.oracle.model import HFModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Of a decoder, what decides whether a workload reaches a condition."""

    num_groups: int
    """Query heads of one KV head."""
    window: int | None
    """Smallest sliding window of any layer; None if all see everything."""
    original_positions: int | None
    """Positions the model was trained on before its rotary embedding was stretched; None if it was not."""

    @classmethod
    def of(cls, hf: HFModel) -> "Traits":
        """Read the traits off HF's configuration."""
        config = hf.config
        num_heads = getattr(config, "num_attention_heads", None) or 1
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        rope = getattr(config, "rope_parameters", None) or {}
        original = getattr(config, "max_position_embeddings", None) if rope.get("rope_type") == "dynamic" else None
        return cls(
            num_groups=num_heads // num_kv_heads,
            window=min((op.window for op in hf.graph if op.window is not None), default=None),
            original_positions=rope.get("original_max_position_embeddings", original),
        )
