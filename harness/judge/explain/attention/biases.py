"""The bias that attention adds to its scores is another (ALiBi's): it is neither a setting nor a tap.

It is changed on its way into the module, and the part is run again by HF's own code.

`B` requests, `N` heads, `T` rows, `S` positions.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from harness.judge.explain.core.fit import fit_factor_near_one
from harness.judge.explain.core.rerun import is_same
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

_NAMED = 2e-3
"""Relative distance up to which a fitted number is one that has been tried."""
_MASK = "attention_mask"
_NAMES = ("alibi", "position_bias", _MASK)
"""Of arguments that may hold a bias: [B * N, 1, S], or [B, N, T, S] where it is part of the mask."""
_HIDDEN = -1e4
"""What is below stands for a position that is not seen."""
Change = Callable[[torch.Tensor], torch.Tensor]


def _ran_again(wrong: WrongOperation) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return where the rows stand in the batch, and what the part gives there, run by itself; None where it cannot."""
    rerun = wrong.rerun
    if rerun is None or wrong.downstream is not None:
        return None
    places = rerun.places(wrong.rows)
    if bool((places < 0).any()):
        return None
    rerun_rows = rerun.run()[places]
    return (places, rerun_rows) if is_same(wrong.expected, rerun_rows) else None


def other_biases(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Yield what the operation gives with the bias left out, turned around, scaled, or of another head.

    Causes: ALiBi, or another bias that HF hands to its attention: left out, of the opposite sign, of the heads in
    reverse order, of the head before or after, *value* times what it should be (added after the scores are scaled, or
    before; its exponents begin at 0 or 2).
    """
    num_heads, reran = getattr(wrong.config, "num_attention_heads", None), _ran_again(wrong)
    if num_heads is None or reran is None:
        return
    places, rerun_rows = reran
    for bias in (_Bias(wrong, places, num_heads, *item) for item in _handed(wrong)):
        if torch.equal(bias.under(torch.zeros_like), rerun_rows):
            continue  # nothing is computed with it
        for how, change in _ways(num_heads).items():
            yield Hypothesis(cause=f"{bias.label} {how}", output=bias.under(change))
        factor = fit_factor_near_one(wrong.actual, rerun_rows, bias.times)
        if factor is not None and factor > _NAMED and abs(factor - 1) > _NAMED:
            cause = f"{bias.label} is {factor:.4g} times what it should be{_why(wrong, factor)}"
            yield Hypothesis(cause=cause, output=bias.times(factor), num_fitted=1)


@dataclass(frozen=True, slots=True)
class _Bias:
    """A bias that a module is handed."""

    wrong: WrongOperation
    places: torch.Tensor
    """Where the rows stand in the batch, [R] int64."""
    num_heads: int
    path: str
    """Of the module."""
    name: str
    """Of the argument."""

    @property
    def label(self) -> str:
        return f"{self.name} of {self.path}" if self.name != _MASK else f"the bias in {_MASK} of {self.path}"

    def under(self, change: Change) -> torch.Tensor:
        """Return the rows with the bias changed, [R, W] float64."""
        assert self.wrong.rerun is not None
        with self._changed(change):
            return self.wrong.rerun.run()[self.places]

    def times(self, factor: float) -> torch.Tensor:
        return self.under(lambda bias: bias * factor)

    def _changed(self, change: Change) -> RemovableHandle:
        def replace(_: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            bias = named.get(self.name)
            if not isinstance(bias, torch.Tensor) or not self._is_of_heads(bias):
                return arguments, named
            is_seen = bias > _HIDDEN
            return arguments, named | {self.name: torch.where(is_seen, change(bias.where(is_seen, 0)), bias)}

        return self.wrong.hf.module(self.path).register_forward_pre_hook(replace, with_kwargs=True)

    def _is_of_heads(self, bias: torch.Tensor) -> bool:
        return bias.is_floating_point() and bias.dim() > 2 and bias.shape[-3] % self.num_heads == 0


def _ways(num_heads: int) -> Mapping[str, Change]:
    def of_heads(order: Change) -> Change:
        return lambda bias: order(bias.reshape(-1, num_heads, *bias.shape[-2:])).reshape(bias.shape)

    return {
        "is left out": torch.zeros_like,
        "has the opposite sign": torch.neg,
        "has the slopes of the heads in reverse order": of_heads(lambda bias: bias.flip(1)),
        "has for each head the slope of the one before": of_heads(lambda bias: bias.roll(1, 1)),
        "has for each head the slope of the next one": of_heads(lambda bias: bias.roll(-1, 1)),
    }


def _why(wrong: WrongOperation, factor: float) -> str:
    """Say what the factor is, where it is one of ALiBi's own numbers."""
    config = wrong.config
    scale, slope = math.sqrt(config.hidden_size / config.num_attention_heads), 2 ** (8 / config.num_attention_heads)
    reasons = {
        "it is added after the scores are scaled, and not before": scale,
        "it is added before the scores are scaled, and not after": 1 / scale,
        "the exponents of the slopes begin at 0 instead of 1": slope,
        "the exponents of the slopes begin at 2 instead of 1": 1 / slope,
    }
    fitting = [why for why, number in reasons.items() if math.isclose(factor, number, rel_tol=_NAMED)]
    return f": {', or '.join(fitting)}" if fitting else ""


def _handed(wrong: WrongOperation) -> Iterator[tuple[str, str]]:
    """Yield path and argument of each innermost module of the part that may be handed a bias."""
    part = wrong.rerun.part_inputs.call.path  # type: ignore[union-attr]
    takers = [
        (f"{part}.{path}", name)
        for path, module in wrong.hf.module(part).named_modules()
        for name in _NAMES
        if path and name in inspect.signature(module.forward).parameters
    ]
    for path, name in takers:
        if not any(item.startswith(f"{path}.") for item, _ in takers):
            yield path, name
