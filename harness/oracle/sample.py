"""A sample of rows: where the oracle computes products and attention, in the place of everywhere."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.formats.taps import Kind
from harness.oracle.model import HFModel
from harness.oracle.watch import AttentionCall

_ROWLESS_OPTIONS = frozenset({"s_aux", "position_ids", "cache_position"})
"""Tensors among the options of attention that say nothing of single queries, or that no function reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Where products and attention are computed; attention still sees all of its history.

    What is not computed is left to the observer of the run, which replaces all rows of the sample's taps.
    """

    positions: torch.Tensor
    """[n] int64, ascending: of every request."""
    taps: Collection[str]
    """What linear modules and attention give."""

    def modules(self, hf: HFModel) -> Mapping[Kind, Collection[str]]:
        """Return the linear modules, and those of attention, that give nothing but taps of the sample."""
        outputs: dict[tuple[Kind, str], list[str]] = {}
        for op in hf.graph:
            outputs.setdefault((op.kind, op.module), []).append(op.tap)
        whole = {key for key, taps in outputs.items() if all(tap in self.taps for tap in taps)}
        return {
            Kind.LINEAR: {path for kind, path in whole if kind is Kind.LINEAR and type(hf.module(path)) is nn.Linear},
            Kind.ATTENTION: {path for kind, path in whole if kind is Kind.ATTENTION},
        }


def are_queries_apart(call: AttentionCall, function: Callable[..., Any]) -> bool:
    """Whether attention gives a row the same whatever queries are beside it, as far as its options are known.

    Without a mask only torch's own function is known to see what lies before each query.
    """
    from transformers import AttentionInterface

    if call.mask is None:
        is_causal = call.options.get("is_causal") is not False and getattr(call.module, "is_causal", True)
        is_known = function is AttentionInterface()["sdpa"] and call.query.shape[2] == call.key.shape[2]
        if not (is_causal and is_known):
            return False
    return {name for name, value in call.options.items() if isinstance(value, torch.Tensor)} <= _ROWLESS_OPTIONS
