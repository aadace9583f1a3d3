"""Experts in the place of an MLP.

Shapes: T tokens, D hidden, F ffn of one expert, E experts, G groups of them, C chosen ones of a token.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from reference_engine.batch import Batch
from reference_engine.checkpoint.experts import ExpertsShape, Groups
from reference_engine.families.parts import LayerParts
from reference_engine.layers import MLP, Linear

__all__ = ["Expert", "Experts", "GroupedExperts", "build_experts"]

_TOP_OF_GROUP = 2
"""A group is as good as the sum of its best experts, so many of them."""


@dataclass(frozen=True, slots=True)
class Expert:
    """One of the experts of a layer."""

    gate_up_proj: Linear
    down_proj: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x_TD: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return [T, D] of the tokens that chose it."""
        gate_TF, up_TF = self.gate_up_proj(x_TD).chunk(2, dim=-1)
        return self.down_proj(activation(gate_TF) * up_TF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sends each token to its best experts, and adds up what they return (Shazeer et al. 2017).

    Experts run one after the other, each over the tokens that chose it; which ones run is known on the host alone.
    """

    router: Linear
    experts: tuple[Expert, ...]
    num_chosen: int
    normalizes_weights: bool
    """Whether the weights of a token's experts add up to one."""
    activation: Callable[[torch.Tensor], torch.Tensor]
    shared: MLP | None = None
    """The expert that every token goes through."""
    shared_gate: Linear | None = None
    """Its gate, if it has one: one number for each token."""

    def __call__(self, x_TD: torch.Tensor, batch: Batch, prefix: str) -> torch.Tensor:
        """Return [T, D]; `prefix` starts the names of the taps."""
        if self.shared is None:
            return self._routed(x_TD, batch, prefix)
        shared_TD = self.shared(x_TD, batch, prefix)
        routed_TD = self._routed(x_TD, batch, prefix)
        if self.shared_gate is not None:
            gate_T1 = self.shared_gate(x_TD)
            batch.tap(prefix, "mlp.shared_expert_gate", gate_T1)
            shared_TD = gate_T1.sigmoid() * shared_TD
        out_TD = routed_TD + shared_TD
        batch.tap(prefix, "mlp", out_TD)
        return out_TD

    def _routed(self, x_TD: torch.Tensor, batch: Batch, prefix: str) -> torch.Tensor:
        weights_TC, chosen_TC = self._route(x_TD, batch, prefix)
        out_TD = torch.zeros_like(x_TD)
        for number in chosen_TC.unique().tolist():  # in order, so that each token's sum has one order
            rows, places = torch.where(chosen_TC == number)
            weighted = self.experts[number](x_TD[rows], self.activation) * weights_TC[rows, places, None]
            out_TD.index_add_(0, rows, weighted.to(out_TD.dtype))
        batch.tap(prefix, "mlp.experts", out_TD)
        return out_TD

    def _route(self, x_TD: torch.Tensor, batch: Batch, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and numbers of each token's experts, both [T, C], the best first."""
        logits_TE = self.router(x_TD)
        batch.tap(prefix, "mlp.gate", logits_TE)
        weights_TC, chosen_TC = logits_TE.softmax(dim=-1, dtype=torch.float32).topk(self.num_chosen, dim=-1)
        if self.normalizes_weights:
            weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
        weights_TC = weights_TC.to(x_TD.dtype)
        batch.tap(prefix, "mlp.gate.topk", chosen_TC)
        batch.tap(prefix, "mlp.gate.1", weights_TC)
        return weights_TC, chosen_TC


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedExperts(Experts):
    """Experts whose choice is corrected by a bias and limited to the best groups (DeepSeek-AI 2024, V3, section 2.1.2).

    The router computes in float32, and weights stay in it.
    """

    correction_E: torch.Tensor
    """Added to the scores for the choice alone; float32."""
    groups: Groups

    def _route(self, x_TD: torch.Tensor, batch: Batch, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Experts._route`."""
        logits_TE = self.router(x_TD.float())
        batch.tap(prefix, "mlp.gate", logits_TE)
        scores_TE = logits_TE.sigmoid()
        chosen_TC = self._choose(scores_TE + self.correction_E, batch, prefix)
        weights_TC = scores_TE.gather(1, chosen_TC)
        if self.normalizes_weights:
            weights_TC = weights_TC / (weights_TC.sum(dim=-1, keepdim=True) + 1e-20)
        weights_TC = weights_TC * self.groups.scaling
        batch.tap(prefix, "mlp.gate.topk@3", chosen_TC)
        batch.tap(prefix, "mlp.gate.1", weights_TC)
        return weights_TC, chosen_TC

    def _choose(self, scores_TE: torch.Tensor, batch: Batch, prefix: str) -> torch.Tensor:
        """Return the numbers of each token's experts [T, C], all of them in its best groups."""
        scores_TGE = scores_TE.unflatten(1, (self.groups.count, -1))
        best_TG2, places_TG2 = scores_TGE.topk(_TOP_OF_GROUP, dim=-1)
        groups = best_TG2.sum(dim=-1).topk(self.groups.num_chosen, dim=-1).indices
        batch.tap(prefix, "mlp.gate.topk", places_TG2)
        batch.tap(prefix, "mlp.gate.topk@2", groups)
        is_chosen_TG1 = torch.zeros_like(scores_TGE[..., :1], dtype=torch.bool).scatter_(1, groups[..., None], True)
        scores_TE = scores_TGE.masked_fill(~is_chosen_TG1, float("-inf")).flatten(1)
        return scores_TE.topk(self.num_chosen, dim=-1).indices


def build_experts(shape: ExpertsShape, parts: LayerParts) -> Experts:
    """Assemble the experts of a layer."""
    shared = None
    if shape.shared_size:
        name = f"mlp.{shape.shared_name}"
        gate_up_proj, down_proj = parts.linear(f"{name}.gate_up_proj"), parts.row_parallel(f"{name}.down_proj")
        shared = MLP(gate_up_proj, down_proj, parts.activation, name)
    names = [f"mlp.experts.{number}" for number in range(shape.num_experts)]
    arguments: dict[str, Any] = {
        "router": parts.linear("mlp.gate"),
        "experts": tuple(
            Expert(parts.linear(f"{name}.gate_up_proj"), parts.row_parallel(f"{name}.down_proj")) for name in names
        ),
        "num_chosen": shape.num_chosen,
        "normalizes_weights": shape.normalizes_weights,
        "activation": parts.activation,
        "shared": shared,
        "shared_gate": parts.linear("mlp.shared_expert_gate") if shape.is_shared_gated else None,
    }
    if shape.groups is None:
        return Experts(**arguments)
    correction_E = parts.weight("mlp.gate.e_score_correction_bias")
    return GroupedExperts(**arguments, groups=shape.groups, correction_E=correction_E)
