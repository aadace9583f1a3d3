"""Mixtures of experts: what a router chooses and weighs, and what is computed of it."""

from collections.abc import Callable
from typing import Any

import torch

from harness.extensions.faults.fault import ANY_ROW, FIRST, Category, table_of
from harness.extensions.faults.reference.injection import replacing
from harness.extensions.faults.reference.weights import Weights, loaded
from reference_engine.batch import Batch
from reference_engine.families.experts import Experts

_CHOICE, _WEIGHTS, _EXPERTS = (f"model.layers.0.mlp.{site}" for site in ("gate.topk", "gate.1", "experts"))
_E0 = "model.layers.0.mlp.experts."
Route = tuple[torch.Tensor, torch.Tensor]
"""Weights and numbers of each token's experts, both [T, C]."""


def routed(change: Callable[[Experts, torch.Tensor], Route]) -> Any:
    """Choose and weigh by `change`, of the router's logits [T, E], and show that."""

    def make(original: Any, self: Experts, x_TD: torch.Tensor, batch: Batch, prefix: str) -> Route:
        logits_TE = self.router(x_TD)
        batch.tap(prefix, "mlp.gate", logits_TE)
        weights_TC, chosen_TC = change(self, logits_TE)
        weights_TC = weights_TC.to(x_TD.dtype)
        batch.tap(prefix, "mlp.gate.topk", chosen_TC)
        batch.tap(prefix, "mlp.gate.1", weights_TC)
        return weights_TC, chosen_TC

    return replacing((Experts, "_route", make))


def _best(self: Experts, logits_TE: torch.Tensor) -> Route:
    """The router's output as it should be, but with the weights left unnormalised."""
    weights_TC, chosen_TC = logits_TE.softmax(dim=-1, dtype=torch.float32).topk(self.num_chosen, dim=-1)
    return weights_TC, chosen_TC


def _normalised(route: Route) -> Route:
    return route[0] / route[0].sum(dim=-1, keepdim=True), route[1]


def _lowest(self: Experts, logits_TE: torch.Tensor) -> Route:
    chosen_TC = logits_TE.topk(self.num_chosen, dim=-1, largest=False).indices
    return _normalised((logits_TE.softmax(dim=-1).gather(-1, chosen_TC), chosen_TC))


def _from_the_second(self: Experts, logits_TE: torch.Tensor) -> Route:
    chosen_TC = logits_TE.topk(self.num_chosen + 1, dim=-1).indices[:, 1:]
    return _normalised((logits_TE.softmax(dim=-1).gather(-1, chosen_TC), chosen_TC))


def _softmax_twice(self: Experts, logits_TE: torch.Tensor) -> Route:
    weights_TC, chosen_TC = _best(self, logits_TE)
    return weights_TC.softmax(dim=-1), chosen_TC


def _by_sigmoid(self: Experts, logits_TE: torch.Tensor) -> Route:
    chosen_TC = logits_TE.topk(self.num_chosen, dim=-1).indices
    return _normalised((logits_TE.sigmoid().gather(-1, chosen_TC), chosen_TC))


def _unused(self: Experts, logits_TE: torch.Tensor) -> Route:
    weights_TC, chosen_TC = _best(self, logits_TE)
    return torch.ones_like(weights_TC), chosen_TC


def _reversed(self: Experts, logits_TE: torch.Tensor) -> Route:
    weights_TC, chosen_TC = _normalised(_best(self, logits_TE))
    return weights_TC.flip(-1), chosen_TC


def mixed(change: Callable[[Experts, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """Compute the experts by `change`, of tokens [T, D], weights and numbers [T, C], which are shown as they are."""

    def make(original: Any, self: Experts, x_TD: torch.Tensor, batch: Batch, prefix: str) -> torch.Tensor:
        weights_TC, chosen_TC = self._route(x_TD, batch, prefix)
        out_TD = change(self, x_TD, weights_TC, chosen_TC)
        batch.tap(prefix, "mlp.experts", out_TD)
        return out_TD

    return replacing((Experts, "__call__", make))


def sum_of(self: Experts, x_TD: torch.Tensor, weights_TC: torch.Tensor, chosen_TC: torch.Tensor) -> torch.Tensor:
    """Return the outputs [T, D] of each token's experts, weighted and added, as it should be."""
    out_TD = torch.zeros_like(x_TD)
    for number in chosen_TC.unique().tolist():
        rows, places = torch.where(chosen_TC == number)
        outputs = self.experts[number](x_TD[rows], self.activation) * weights_TC[rows, places, None]
        out_TD.index_add_(0, rows, outputs)
    return out_TD


def _weights_before(self: Experts, x_TD: torch.Tensor, weights_TC: torch.Tensor, chosen_TC: torch.Tensor) -> Any:
    ones_T1 = torch.ones_like(weights_TC[:, :1])
    parts = [sum_of(self, x_TD * weights_TC[:, at, None], ones_T1, chosen_TC[:, [at]]) for at in range(self.num_chosen)]
    return sum(parts)


def _rank_missing(self: Experts, x_TD: torch.Tensor, weights_TC: torch.Tensor, chosen_TC: torch.Tensor) -> Any:
    """The experts of another rank, 1 and 6, are not added."""
    return sum_of(self, x_TD, weights_TC.masked_fill(chosen_TC % 5 == 1, 0), chosen_TC)


def _swapped(weights: Weights, config: Any) -> None:
    _exchange(weights, _E0 + "1.", _E0 + "6.")


def _exchange(weights: Weights, first: str, second: str) -> None:
    for name in [name for name in weights if name.startswith(first)]:
        there = second + name.removeprefix(first)
        weights[name], weights[there] = weights[there], weights[name]


def _duplicated(weights: Weights, config: Any) -> None:
    for name in [name for name in weights if name.startswith(_E0 + "6.")]:
        weights[name] = weights[_E0 + "2." + name.removeprefix(_E0 + "6.")]


def _stale(weights: Weights, config: Any) -> None:
    """One expert holds its weights from before the last update."""
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.startswith(_E0 + "6.")]:
        noise = torch.randn(weights[name].shape, generator=generator).to(weights[name])
        weights[name] += 0.1 * weights[name].std() * noise


def _unloaded(weights: Weights, config: Any) -> None:
    weights[_E0 + "6.down_proj.weight"].zero_()


def _of_the_layer_behind(weights: Weights, config: Any) -> None:
    for name in [name for name in weights if name.startswith(_E0)]:
        weights[name] = weights[name.replace("layers.0.", "layers.1.")]


def _one_of_the_layer_behind(weights: Weights, config: Any) -> None:
    for name in [name for name in weights if name.startswith(_E0 + "1.")]:
        weights[name] = weights[name.replace("layers.0.", "layers.1.")]


def _gate_and_up(weights: Weights, config: Any) -> None:
    for name in [name for name in weights if name.startswith(_E0) and ".gate_up_proj." in name]:
        gate, up = weights[name].chunk(2)
        weights[name] = torch.cat((up, gate))


_fault = table_of(category=Category.EXPERTS, tap=_EXPERTS, row=FIRST, model="qwen3-moe-tiny")
FAULTS = [
    _fault("router-lowest", "The experts with the lowest scores are chosen.", routed(_lowest),
           "lowest scores", _CHOICE),
    _fault("router-from-the-second", "The best expert is passed over.", routed(_from_the_second),
           "begins at the second", _CHOICE),
    _fault("router-one-expert", "One expert is chosen where it should be two.",
           routed(lambda self, logits: _normalised(logits.softmax(dim=-1).topk(1, dim=-1))),
           "has 1 chosen experts, and should have 2", _CHOICE),
    _fault("router-not-normalised", "The weights of a token's experts do not add up to one.", routed(_best),
           "not normalised", _WEIGHTS),
    _fault("router-normalised", "The softmax runs over the chosen experts alone.",
           routed(lambda self, x: _normalised(_best(self, x))), "softmax over the chosen", _WEIGHTS,
           config={"norm_topk_prob": False}),
    _fault("router-softmax-twice", "A softmax is applied to the chosen probabilities.", routed(_softmax_twice),
           "softmax of the softmax", _WEIGHTS),
    _fault("router-sigmoid", "The scores are sigmoids.", routed(_by_sigmoid), "made by a sigmoid", _WEIGHTS),
    _fault("router-weights-all-one", "Every chosen expert has the weight one.", routed(_unused), "all one", _WEIGHTS),
    _fault("router-weights-reversed", "The best expert gets the weight of the last one.", routed(_reversed),
           "another order", _WEIGHTS),
    _fault("experts-without-weights", "The outputs are added without their weights.",
           mixed(lambda self, x, weights, chosen: sum_of(self, x, torch.ones_like(weights), chosen)),
           "without the router's weights"),
    _fault("experts-weighted-twice", "The weights are applied twice.",
           mixed(lambda self, x, weights, chosen: sum_of(self, x, weights.square(), chosen)), "applied twice"),
    _fault("experts-weights-exchanged", "The experts of a token get each other's weights.",
           mixed(lambda self, x, weights, chosen: sum_of(self, x, weights.flip(-1), chosen)), "each other's weights"),
    _fault("experts-weighted-input", "The weights are applied to the experts' input.", mixed(_weights_before),
           "applied to the experts' input"),
    _fault("experts-first-only", "Only the best expert's output is added.",
           mixed(lambda self, x, weights, chosen: sum_of(self, x, weights[:, :1], chosen[:, :1])),
           "only the first of the chosen experts"),
    _fault("experts-off-by-one", "Every token is sent to the expert after its own.",
           mixed(lambda self, x, weights, chosen: sum_of(self, x, weights, (chosen + 1) % len(self.experts))),
           r"numbers of the experts are off by \+1"),
    _fault("experts-rank-missing", "The outputs of another rank's experts are lost.", mixed(_rank_missing),
           "output of experts 1, 6 is not added"),
    _fault("experts-swapped", "Two experts are swapped.", loaded(_swapped), "1 and 6 are swapped"),
    # The tokens decide which row is the first that takes an expert.
    _fault("expert-of-another", "One expert has the weights of another.", loaded(_duplicated),
           "expert 6 is computed with the weights of expert 2", row=ANY_ROW),
    _fault("expert-stale", "One expert was not updated.", loaded(_stale), "expert 6 is another than", row=ANY_ROW),
    _fault("expert-not-loaded", "The last product of one expert is zero.", loaded(_unloaded),
           "output of expert 6 is not added", row=ANY_ROW),
    _fault("expert-of-another-layer", "One expert is that of the next layer.", loaded(_one_of_the_layer_behind),
           "expert 1 are those of expert 1 of model.layers.1", row=ANY_ROW),
    _fault("experts-of-another-layer", "The experts are those of the next layer.", loaded(_of_the_layer_behind),
           "experts are those of model.layers.1"),
    _fault("experts-gate-and-up", "Gate and up of the experts are swapped.", loaded(_gate_and_up),
           "gate and up are swapped"),
]  # fmt: skip
