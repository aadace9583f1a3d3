"""The bias that attention adds to its scores is another (ALiBi's): it is neither a setting nor a tap.

`N` heads, `T` rows, `S` positions.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.core.fit import fit_factor_near_one
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

_NAMED = 2e-3
"""Relative distance up to which a fitted number is one that has been tried."""
_WAYS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "is left out": torch.zeros_like,
    "has the opposite sign": torch.neg,
    "has the slopes of the heads in reverse order": lambda bias: bias.flip(0),
    "has for each head the slope of the one before": lambda bias: bias.roll(1, 0),
    "has for each head the slope of the next one": lambda bias: bias.roll(-1, 0),
}
"""What may be done to a bias [N or 1, T, S]."""


def other_biases(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Yield what attention gives with the bias left out, turned around, scaled, or of another head.

    Causes: the bias of the scores (ALiBi, for one) is left out, has the opposite sign, the slopes of the heads in
    reverse order, or of the head before or after; is *value* times what it should be (added after the scores are
    scaled, or before; its exponents begin at 0 or 2).
    """
    if all(view.bias is None for view in wrong.views):
        return

    def under(change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        def attend(view: AttentionContext) -> torch.Tensor:
            return view.attend() if view.bias is None else replace(view, bias=change(view.bias)).attend()

        return wrong.over_views(attend)

    def seen(output: torch.Tensor) -> torch.Tensor:
        return output if wrong.downstream is None else wrong.downstream.push(output, torch.arange(len(output)))

    for how, change in _WAYS.items():
        yield Hypothesis(cause=f"the bias of the scores {how}", output=under(change))
    actual = wrong.actual if wrong.downstream is None else wrong.downstream.actual
    factor = fit_factor_near_one(actual, seen(wrong.expected), lambda factor: seen(under(lambda bias: bias * factor)))
    if factor is not None and factor > _NAMED and abs(factor - 1) > _NAMED:
        cause = f"the bias of the scores is {factor:.4g} times what it should be{_why(wrong, factor)}"
        yield Hypothesis(cause=cause, output=under(lambda bias: bias * factor), num_fitted=1)


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
