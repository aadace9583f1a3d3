"""Experts in the place of an MLP.

Shapes: T tokens, D hidden, F ffn of one expert, E experts, C chosen ones of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from reference_engine.batch import Batch
from reference_engine.checkpoint.experts import ExpertsShape
from reference_engine.layers import MLP, Linear

__all__ = ["Expert", "Experts", "build_experts"]


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
    """Its gate: one number for each token."""

    def __call__(self, x_TD: torch.Tensor, batch: Batch, prefix: str) -> torch.Tensor:
        """Return [T, D]; `prefix` starts the names of the taps."""
        if self.shared is None or self.shared_gate is None:
            return self._routed(x_TD, batch, prefix)
        shared_TD = self.shared(x_TD, batch, prefix)
        routed_TD = self._routed(x_TD, batch, prefix)
        gate_T1 = self.shared_gate(x_TD)
        batch.tap(prefix, "mlp.shared_expert_gate", gate_T1)
        out_TD = routed_TD + gate_T1.sigmoid() * shared_TD
        batch.tap(prefix, "mlp", out_TD)
        return out_TD

    def _routed(self, x_TD: torch.Tensor, batch: Batch, prefix: str) -> torch.Tensor:
        weights_TC, chosen_TC = self._route(x_TD, batch, prefix)
        out_TD = torch.zeros_like(x_TD)
        for number in chosen_TC.unique().tolist():  # in order, so that each token's sum has one order
            rows, places = torch.where(chosen_TC == number)
            own = self.experts[number](x_TD[rows], self.activation) * weights_TC[rows, places, None]
            out_TD.index_add_(0, rows, own)
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


def build_experts(
    shape: ExpertsShape,
    linear: Callable[[str], Linear],
    row_parallel: Callable[[str], Callable[[torch.Tensor], torch.Tensor]],
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> Experts:
    """Assemble the experts of a layer; `linear` and `row_parallel` take the names of its products."""
    names = [f"mlp.experts.{number}" for number in range(shape.num_experts)]
    shared = None
    if shape.shared_size:
        name = "mlp.shared_expert"
        shared = MLP(linear(f"{name}.gate_up_proj"), row_parallel(f"{name}.down_proj"), activation, name)
    return Experts(
        router=linear("mlp.gate"),
        experts=tuple(Expert(linear(f"{name}.gate_up_proj"), row_parallel(f"{name}.down_proj")) for name in names),
        num_chosen=shape.num_chosen,
        normalizes_weights=shape.normalizes_weights,
        activation=activation,
        shared=shared,
        shared_gate=linear("mlp.shared_expert_gate") if shape.shared_size else None,
    )
