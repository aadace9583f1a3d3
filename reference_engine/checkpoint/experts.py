"""Experts in the place of an MLP: how many, how a token's are chosen, and what a checkpoint holds of them.

Shapes: D hidden, F ffn of one expert, S ffn of the shared one, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from reference_engine.checkpoint.config_file import ConfigFields
from reference_engine.checkpoint.placement import Placement, stacked
from reference_engine.errors import ConfigError, UnsupportedModelError

__all__ = ["ExpertsShape", "Groups", "deepseek_v3_experts", "qwen3_moe_experts", "qwen3_next_experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of experts that a choice is limited to."""

    count: int
    num_chosen: int
    """Groups of one token."""
    scaling: float
    """Factor of the weights of a token's experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """The experts of one layer; see `MLPShape`."""

    num_experts: int
    num_chosen: int
    """Experts of one token."""
    intermediate_size: int
    """Of each expert."""
    normalizes_weights: bool
    """Whether the weights of a token's experts add up to one."""
    shared_size: int = 0
    """Ffn of the expert that every token goes through; 0: there is none."""
    shared_name: str = "shared_expert"
    groups: Groups | None = None
    """Of a router by sigmoid whose choice a bias corrects; None: it is one by softmax, and the shared expert is gated.
    """

    @property
    def is_shared_gated(self) -> bool:
        """Whether the shared expert has a gate of its own."""
        return bool(self.shared_size) and self.groups is None

    def tensors(self, prefix: str, hidden_size: int) -> Iterator[tuple[str, Placement]]:
        """Yield the router [E, D], gate and up [F, D] and down [D, F] of each expert, and the shared one's parts."""
        router, has_groups = (self.num_experts, hidden_size), self.groups is not None
        yield f"{prefix}gate.weight", Placement(f"{prefix}gate.weight", router, stays_float32=has_groups)
        if has_groups:
            correction = f"{prefix}gate.e_score_correction_bias"
            yield correction, Placement(correction, router[:1], stays_float32=True)
        gate_up = {"gate_proj": self.intermediate_size, "up_proj": self.intermediate_size}
        for expert in range(self.num_experts):
            expert_prefix = f"{prefix}experts.{expert}."
            yield from stacked(expert_prefix, "gate_up_proj", gate_up, hidden_size)
            yield from stacked(expert_prefix, "down_proj", {"down_proj": hidden_size}, self.intermediate_size)
        if self.shared_size:
            expert_prefix = f"{prefix}{self.shared_name}."
            gate_up = {"gate_proj": self.shared_size, "up_proj": self.shared_size}
            yield from stacked(expert_prefix, "gate_up_proj", gate_up, hidden_size)
            yield from stacked(expert_prefix, "down_proj", {"down_proj": hidden_size}, self.shared_size)
        if self.is_shared_gated:
            yield from stacked(prefix, "shared_expert_gate", {"shared_expert_gate": 1}, hidden_size)

    def shard(self, num_ranks: int) -> ExpertsShape:
        """Return all experts, each with one rank's part of its ffn.

        Raises:
            ConfigError: the ffn does not divide.
        """
        if self.intermediate_size % num_ranks:
            raise ConfigError(
                "moe_intermediate_size does not divide among the ranks", where="tensor parallel",
                expected=f"a number of ranks that divides {self.intermediate_size}", actual=f"{num_ranks} ranks",
            )  # fmt: skip
        if self.shared_size and num_ranks > 1:
            raise ConfigError(
                "a shared expert is not split among ranks", where="tensor parallel", expected="1 rank", actual=num_ranks
            )
        return replace(self, intermediate_size=self.intermediate_size // num_ranks)


def qwen3_moe_experts(fields: ConfigFields) -> Mapping[int, ExpertsShape]:
    """Read the experts of each layer that has them.

    Raises:
        ConfigError: a field is missing or impossible.
    """
    step = fields.positive_int("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ConfigError("mlp_only_layers is impossible", where=fields.where, expected="layers", actual=repr(dense))
    num_layers = fields.positive_int("num_hidden_layers")
    sparse = [layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense]
    return dict.fromkeys(sparse, _shape(fields)) if sparse else {}


def qwen3_next_experts(fields: ConfigFields) -> Mapping[int, ExpertsShape]:
    """Read the experts of each layer that has them, and the one that all of its tokens share.

    Raises:
        ConfigError: a field is missing or impossible.
    """
    if fields.values.get("num_experts") == 0:
        return {}
    shared_size = fields.positive_int("shared_expert_intermediate_size", 512)
    with_default = ConfigFields({"norm_topk_prob": True, **fields.values}, fields.where)
    return {layer: replace(shape, shared_size=shared_size) for layer, shape in qwen3_moe_experts(with_default).items()}


def deepseek_v3_experts(fields: ConfigFields) -> Mapping[int, ExpertsShape]:
    """Read the experts of each layer after the first dense ones, with those that all of its tokens share.

    Raises:
        ConfigError: a field is missing or impossible.
        UnsupportedModelError: experts are chosen in another way.
    """
    for name, expected in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if fields.values.get(name, expected) not in (expected, None):
            raise UnsupportedModelError(
                f"unsupported {name}", where=fields.where, expected=expected, actual=fields.values[name]
            )
    size = fields.positive_int("moe_intermediate_size", 2048)
    shape = ExpertsShape(
        num_experts=fields.positive_int("n_routed_experts", 256),
        num_chosen=fields.positive_int("num_experts_per_tok", 8),
        intermediate_size=size,
        normalizes_weights=fields.boolean("norm_topk_prob", default=True),
        shared_size=size * fields.positive_int("n_shared_experts", 1),
        shared_name="shared_experts",
        groups=Groups(
            count=fields.positive_int("n_group", 8),
            num_chosen=fields.positive_int("topk_group", 4),
            scaling=fields.number("routed_scaling_factor", 2.5),
        ),
    )
    _check_groups(shape, fields)
    first = fields.positive_int("first_k_dense_replace", 3, least=0)
    return dict.fromkeys(range(first, fields.positive_int("num_hidden_layers")), shape)


def _check_groups(shape: ExpertsShape, fields: ConfigFields) -> None:
    """Refuse groups that do not divide the experts, or hold too few of them."""
    groups, size = shape.groups, 0
    assert groups is not None
    if shape.num_experts % groups.count == 0:
        size = shape.num_experts // groups.count
    if size < 2 or groups.num_chosen > groups.count or shape.num_chosen > groups.num_chosen * size:
        raise ConfigError(
            "groups of experts are impossible", where=fields.where,
            expected="n_group groups of two or more, of which topk_group hold num_experts_per_tok",
            actual=f"{shape.num_experts} experts, n_group {groups.count}, topk_group {groups.num_chosen}, "
            f"num_experts_per_tok {shape.num_chosen}",
        )  # fmt: skip


def _shape(fields: ConfigFields) -> ExpertsShape:
    # transformers 5 writes num_local_experts, everybody else num_experts.
    name = "num_local_experts" if fields.values.get("num_experts") is None else "num_experts"
    shape = ExpertsShape(
        num_experts=fields.positive_int(name),
        num_chosen=fields.positive_int("num_experts_per_tok"),
        intermediate_size=fields.positive_int("moe_intermediate_size"),
        normalizes_weights=fields.boolean("norm_topk_prob", default=False),
    )
    if shape.num_chosen > shape.num_experts:
        raise ConfigError(
            "num_experts_per_tok is impossible", where=fields.where, expected=f"at most {name} = {shape.num_experts}",
            actual=shape.num_chosen,
        )  # fmt: skip
    return shape
