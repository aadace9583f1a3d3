"""Faults planted into a loaded model of any family, and where each shows first.

for fault in applicable(build("qwen3_moe")):
    faulty = build("qwen3_moe")  # or any other copy, in any dtype and on any device
    fault.inject(faulty)
    print(fault.name, fault.sites)  # the modules that may be blamed
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from harness.extensions.faults.placed import attention, experts, multipliers, states, weights
from harness.extensions.faults.placed.plan import PlacedPlan
from harness.extensions.faults.zoo.divergence import ModuleEvent, first_difference, innermost_called, trace
from harness.extensions.faults.zoo.models import logits, tokens

FAULTS: dict[str, Callable[[nn.Module], list[PlacedPlan]]] = {
    "attention_scale": attention.scale,
    "attention_softcap": attention.softcap,
    "attention_window": attention.window,
    "attention_sinks": attention.sinks,
    "query_heads": attention.heads,
    "rope_theta": attention.rope_theta,
    "norm_eps": weights.norm_eps,
    "norm_weight": weights.norm_weight,
    "linear_from_elsewhere": weights.linear_from_elsewhere,
    "bias_dropped": weights.bias_dropped,
    "gate_and_up": weights.gate_and_up,
    "state_decay": weights.state_decay,
    "experts_swapped": experts.swapped,
    "router_top_k": experts.one_less,
    "routed_scaling": multipliers.routed,
    "embedding_multiplier": multipliers.embedding,
    "residual_multiplier": multipliers.residual,
    "logits_multiplier": multipliers.logits,
    "logits_softcap": multipliers.logits_cap,
}
"""By name, a function that returns the places of a model where the fault may be planted, the best first."""
IN_DECODE: dict[str, Callable[[nn.Module], list[PlacedPlan]]] = {
    "state_forgotten": states.forgotten,
    "state_frozen": states.frozen,
}
"""Those that show in decode alone."""
TRUTHS = {
    "attention_scale": r"softmax scale is|scaling of|gain",
    "attention_softcap": r"soft cap",
    "attention_window": r"window",
    "attention_sinks": r"sink",
    "query_heads": r"another order|heads",
    "rope_theta": r"theta|frequencies are off",
    "norm_eps": r"eps",
    "norm_weight": "weight",
    "linear_from_elsewhere": r"weights? (are|is)|without its bias|outputs are those|none of|not quite",
    "bias_dropped": r"bias",
    "gate_and_up": r"weights are those of|swapped|wrong order",
    "state_decay": r"A_log|decay|is scaled by 1.1|gain",
    "experts_swapped": r"swapped|computed with the weights of expert",
    "router_top_k": r"wrong top-k|only the first of the chosen",
    "routed_scaling": r"scaling factor|gain|normalised to a sum of one after",
    "embedding_multiplier": r"gain|scaled|output is that of",
    "residual_multiplier": r"factor|gain",
    "logits_multiplier": r"gain|output is that of",
    "logits_softcap": r"output is that of|cap",
    "state_forgotten": r"state is not carried from one step",
    "state_frozen": r"state is not updated in decode",
}
"""What may be said of the cause of each: what was done, or what gives the same numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFault:
    """A fault in one place of an architecture."""

    name: str
    """A key of FAULTS, whose docstring says what is wrong."""
    index: int
    """Which of the places."""
    sites: tuple[str, ...]
    """Paths of the modules that may be blamed, in the order of the run. The empty path is the model itself."""

    def inject(self, model: nn.Module) -> None:
        """Make a model of that architecture wrong, in place and for good."""
        FAULTS[self.name](model)[self.index].inject()


def applicable(model: nn.Module) -> list[PlacedFault]:
    """Return the faults that apply to a float32 model of the zoo, each in the first place where it changes the logits.

    An attribute that a module holds and does not use is no place, so each place is tried in a copy.
    """
    sound, events = logits(model, tokens()), trace(model, tokens())
    places = {name: first_felt(model, name, sound) for name in FAULTS}
    return [
        PlacedFault(name=name, index=index, sites=sites(model, name, index, events))
        for name, index in places.items()
        if index is not None
    ]


def first_felt(model: nn.Module, name: str, sound: torch.Tensor) -> int | None:
    """Return the index of the first place where a fault changes the logits [T, V] in any bit."""
    indices = range(len(FAULTS[name](model)))
    return next((at for at in indices if not torch.equal(logits(planted(model, name, at), tokens()), sound)), None)


def planted(model: nn.Module, name: str, index: int) -> nn.Module:
    """Return a copy of a model with a fault in it."""
    faulty = copy.deepcopy(model)
    FAULTS[name](faulty)[index].inject()
    return faulty


def sites(model: nn.Module, name: str, index: int, events: list[ModuleEvent]) -> tuple[str, ...]:
    """Return the modules that may be blamed, of those that are called: some modules only hold a weight for others."""
    plan = FAULTS[name](model)[index]
    for site in plan.sites:
        model.get_submodule(site)  # raises where there is none
    blamed = [innermost_called(site, events) for site in plan.sites]
    if plan.blames_user:
        user = first_difference(events, trace(planted(model, name, index), tokens()), aside_from=blamed[0])
        blamed += [user.path] if user else []
    return tuple(dict.fromkeys(blamed))
