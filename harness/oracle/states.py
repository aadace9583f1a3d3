"""The states that HF's cache of a model holds: whose they are, and of which shape."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from harness.oracle.caches import held_states
from harness.oracle.parts import all_parts_held
from harness.oracle.precision import eager_experts
from harness.oracle.untraced import UntracedModel

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
    found: dict[tuple[int, str], TracedState] = {}

    def after(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any, path: str) -> None:
        for given in (*args, *kwargs.values()):
            for (layer, name), state in held_states(given).items():  # a mixer ends before all that is around it
                shape = tuple(state.shape[1:])
                found.setdefault((layer, name), TracedState(path=path, layer=layer, name=name, shape=shape))

    with ExitStack() as stack:
        stack.enter_context(eager_experts(*hf.configs))
        stack.enter_context(all_parts_held(hf))
        for path, module in hf.model.named_modules():
            hook = module.register_forward_hook(partial(after, path=path), with_kwargs=True)
            stack.callback(hook.remove)
        hf.run(input_ids=torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device=hf.device), use_cache=True)
    return [state for state in found.values() if state.path]
