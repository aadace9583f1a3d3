"""The cache that HF makes for a model by default, and the states that it holds: whose they are, and their shapes."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from harness.oracle.precision import eager_experts
from harness.oracle.untraced import UntracedModel, all_parts_held

_GENERAL = ("cache", "past_key_values")
"""Names of the argument for HF's own kind of cache: the second one before transformers 5.24."""
MIXER_CACHES = (*_GENERAL, "cache_params")
"""Names under which attention, recurrences and convolutions of HF's take the cache."""
_CACHES = (*MIXER_CACHES, "state", "mems")
"""Names under which HF's families return their cache, and take it."""


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the name by which a forward of HF's takes HF's own kind of cache; None if it takes none."""
    taken = inspect.signature(forward).parameters
    return next((name for name in _GENERAL if name in taken), None)


def new_cache(hf: UntracedModel) -> DynamicCache | None:
    """Return an empty cache; None for a family without one, or with one of its own, which it makes itself."""
    if cache_argument(hf.model.forward) and hf.model._supports_default_dynamic_cache():
        with suppress(Exception):  # settings that HF's own cache does not know
            return _with_mtp(hf, DynamicCache(config=hf.config))
    return None


def _with_mtp(hf: UntracedModel, cache: DynamicCache) -> DynamicCache:
    """Let a cache hold that of the layers that predict further tokens: what is done to its layers is done to those."""
    if hf.mtp is not None:
        cache.mtp = hf.mtp.new_cache()
        cache.layers += cache.mtp.layers
    return cache


def cache_windows(hf: UntracedModel) -> dict[int, int]:
    """Return how many of the latest rows suffice to go on, by layer; without the layers that keep all rows."""
    windows = {
        at: getattr(layer, "sliding_window", None) for at, layer in enumerate(getattr(new_cache(hf), "layers", ()))
    }
    return {at: window for at, window in windows.items() if isinstance(window, int)}


def caches_of(output: Any) -> dict[str, Any]:
    """Return the caches in the output of HF's forward, by the names that the family uses."""
    returned = dict(output.items())  # an output of transformers 5.24 answers to old names, too
    return {name: returned[name] for name in _CACHES if returned.get(name) is not None}


def cache_of(output: Any) -> Any:
    """Return the cache that a forward of HF's returned; None if it returned none."""
    return next(iter(caches_of(output).values()), None)


def keeps_states(hf: UntracedModel) -> bool:
    """Whether HF's cache of the model holds states of a recurrence or a convolution, by the types of its layers."""
    with suppress(Exception):  # settings that HF's own cache does not know
        layers = DynamicCache(config=hf.config).layers
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    return False


def held_states(cache: Any) -> dict[tuple[int, str], torch.Tensor]:
    """Return the states that a cache of HF's holds, [requests, ...], by layer and name.

    The names are `conv_state` and `recurrent_state`, of a layer's second one `conv_state.1`. A convolution's that
    keeps its past to go back to is as long as the kernel here. The latest tokens, which some families keep beside, are
    none: they are input, and not computed.
    """
    states = {}
    for at, layer in enumerate(getattr(cache, "layers", ())):
        for name in ("conv", "recurrent"):
            for index, state in getattr(layer, f"{name}_states", {}).items():
                if isinstance(state, torch.Tensor) and state.is_floating_point():
                    kept = state[..., -layer.conv_kernel_size[index] :] if name == "conv" else state
                    states[at, f"{name}_state{f'.{index}' if index else ''}"] = kept
    return states


_NUM_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedState:
    """One state of one layer."""

    path: str
    """Of the module that writes it, the mixer."""
    layer: int
    name: str
    """`conv_state`, `recurrent_state`, `conv_state.1`, ..."""
    shape: tuple[int, ...]
    """Of one request's."""


@torch.no_grad()
def traced_states(hf: UntracedModel) -> list[TracedState]:
    """Run the model over a few tokens, and return the states that its cache holds then."""
    states: dict[tuple[int, str], TracedState] = {}

    def after(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any, path: str) -> None:
        for argument in (*args, *kwargs.values()):
            for (layer, name), state in held_states(argument).items():  # a mixer ends before all that is around it
                shape = tuple(state.shape[1:])
                states.setdefault((layer, name), TracedState(path=path, layer=layer, name=name, shape=shape))

    with ExitStack() as stack:
        stack.enter_context(eager_experts(*hf.configs))
        stack.enter_context(all_parts_held(hf))
        for path, module in hf.model.named_modules():
            hook = module.register_forward_hook(partial(after, path=path), with_kwargs=True)
            stack.callback(hook.remove)
        hf.run(input_ids=torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device=hf.device), use_cache=True)
    return [state for state in states.values() if state.path]
