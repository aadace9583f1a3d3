"""Faults of states: emptied before every step of one row, or put back after it."""

import inspect
from typing import Any

import torch
from torch import nn

from harness.extensions.faults.placed.plan import PlacedPlan, places


def forgotten(model: nn.Module) -> list[PlacedPlan]:
    """A state is not carried from one step of decode to the next."""
    return _stated(model, is_frozen=False)


def frozen(model: nn.Module) -> list[PlacedPlan]:
    """A state is not updated in decode."""
    return _stated(model, is_frozen=True)


def _stated(model: nn.Module, *, is_frozen: bool) -> list[PlacedPlan]:
    return [
        plan
        for which in ("conv", "recurrent")
        for plan in places(model, has_states, lambda module, which=which: _change(module, which, is_frozen))
    ]


def _cache_name(mixer: nn.Module) -> str | None:
    taken = inspect.signature(mixer.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in taken), None)


def has_states(module: nn.Module) -> bool:
    """Tell a mixer that is handed its state in a cache, by the innermost module that takes it."""
    return _cache_name(module) is not None and hasattr(module, "layer_idx") and hasattr(module, "conv1d")


def _change(mixer: Any, which: str, is_frozen: bool) -> None:
    forward, name = mixer.forward, _cache_name(mixer)

    def wrong(hidden_states: torch.Tensor, **rest: Any) -> Any:
        cache = rest.get(name)
        get = None if cache is None else getattr(cache, f"get_{which}_state")
        held = None if get is None or hidden_states.shape[1] > 1 else get(mixer.layer_idx, state_idx=0)
        if held is None:
            return forward(hidden_states, **rest)
        before = held.clone()
        if not is_frozen:
            held.zero_()
        output = forward(hidden_states, **rest)
        if is_frozen:
            get(mixer.layer_idx, state_idx=0).copy_(before)
        return output

    mixer.forward = wrong
