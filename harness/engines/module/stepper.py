"""A user's `nn.Module` as an engine of steps: one request at a time, with the cache that its forward returns."""

from typing import Any

import torch
from torch import nn

from harness.engines.adapter import engine_refusals
from harness.engines.by_content.steps import Work
from harness.engines.module.forward import Forward
from harness.engines.module.values import evaluating
from harness.oracle.caches import held_states


class ModuleStepper:
    """Feeds a module each token once if it takes and returns a cache, and else all tokens again in each step."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Look at the module's forward.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: the forward cannot be called.
        """
        self.module = module
        self._forward = Forward(module, device)
        self._tokens: dict[int, list[int]] = {}
        self._caches: dict[int, Any] = {}
        with evaluating(module):
            self._forward.leave_out_what_it_refuses([0, 0])
            cache = self._forward([0], 0).cache
        self.recomputes = cache is None
        self.rewinds = hasattr(cache, "crop")
        """Whether the cache is one of transformers', which can be cut off at its end."""
        if held_states(cache):
            self.states = self._held

    def step(self, work: Work) -> torch.Tensor:
        """See `Stepper.step`.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: the forward returned no logits, or the cache cannot go back.
            ValueError: the work is of several requests.
        """
        ((request, tokens, first),) = work
        known = self._tokens.setdefault(request, [])
        if num_given_up := len(known) - first:
            del known[first:]
            with engine_refusals(type(self.module).__name__, "--schedule"):
                self._caches[request].crop(-num_given_up)
        known += tokens
        start = 0 if self.recomputes else first
        with evaluating(self.module):
            answer = self._forward(known[start:], start, self._caches.get(request))
        self._caches[request] = answer.cache
        return answer.logits[-len(tokens) :]

    def _held(self, request: int) -> dict[int, dict[str, torch.Tensor]]:
        """Return the states that a request's cache holds, by layer and name."""
        found: dict[int, dict[str, torch.Tensor]] = {}
        for (layer, name), state in held_states(self._caches[request]).items():
            found.setdefault(layer, {})[name] = state[0]
        return found

    def finish(self, request: int) -> None:
        """Forget a request."""
        self._tokens.pop(request, None)
        self._caches.pop(request, None)
