"""A watcher that changes a forward as a setting says: routing, cache, head, recorded values put back.

`B` lanes, `T` tokens of a lane, `K` KV heads, `H` head size.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from harness.extensions.rollout.lanes import LaneBatch, Places
from harness.extensions.rollout.setting import Setting
from harness.formats.taps import Graph
from harness.oracle.model import HFModel
from harness.oracle.watch import CHOICE, AttentionCall, as_rows, from_rows, run_attention


class Altered:
    """Is shown a forward over some lanes, see `Watcher`."""

    kept: dict[str, torch.Tensor] | None = None
    """Where what is shown is kept, [tokens, ...] by source; None to keep nothing."""

    def __init__(
        self, hf: HFModel, setting: Setting, batch: LaneBatch, places: Places, *, head: torch.dtype | None = None
    ) -> None:
        """Take the setting; `head` is the dtype that the head computes in, None for its own."""
        self._hf, self._setting, self._head = hf, setting, head
        self._numbers, self._decoded, self._shape = batch.numbers, batch.decoded, batch.ids.shape
        self._places = places
        self._head_input: torch.Tensor | None = None
        self._routers = router_choices(hf.graph)
        operation = hf.graph.by_tap[hf.graph.logits]
        head_module = hf.model.get_output_embeddings()
        self._head_source = next((path for path, item in hf.model.named_modules() if item is head_module), "")
        self._logits_source = operation.source

    def see(self, source: str, value: torch.Tensor) -> torch.Tensor | None:
        """See `Watcher.see`."""
        return self._with_cut(source, self._in_head(source, value), value)

    def choose(self, source: str, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        """See `Watcher.choose`."""
        value, experts, k = chosen, self._setting.experts, chosen.shape[-1]
        if experts is not None and source in self._routers and experts.ids.shape[1] == k * len(self._routers):
            begin = k * self._routers.index(source)
            value = self._put_back(source, chosen, experts.ids[:, begin : begin + k])
        return self._with_cut(source, value, chosen)

    def _with_cut(self, source: str, value: torch.Tensor, was: torch.Tensor) -> torch.Tensor | None:
        """Return the value with what was recorded of it in its place; None if it is as it was."""
        cut = self._setting.cut
        if cut is not None and source in cut.values:
            value = self._put_back(source, value, cut.values[source])
        self._keep(source, value)
        return None if value is was else value

    def attend(self, call: AttentionCall, function: Callable[..., Any]) -> Any:
        """See `Watcher.attend`."""
        dtype = self._setting.cache
        if dtype is None:
            return run_attention(call, function)
        key, value = (rounded(x, dtype, truncates=self._setting.truncates) for x in (call.key, call.value))
        context, *rest = run_attention(replace(call, key=key, value=value), function)
        if not self._setting.caches_prompt:
            plain, *_ = run_attention(call, function)
            context = torch.where(self._decoded.to(context.device)[..., None, None], context, plain)
        return (context, *rest)

    def _in_head(self, source: str, value: torch.Tensor) -> torch.Tensor:
        """Return the value, computed in the head's dtype, or rounded to it, if it is the head's."""
        if source == f"{self._head_source}:input":
            self._head_input = value
        if source == self._head_source and self._head is not None and self._head_input is not None:
            module = self._hf.model.get_output_embeddings()
            bias = None if module.bias is None else module.bias.to(self._head)
            with torch.autocast(value.device.type, enabled=False):
                value = functional.linear(self._head_input.to(self._head), module.weight.to(self._head), bias)
        if source == self._logits_source and self._setting.head is not None:
            return value.to(self._setting.head).to(value.dtype)
        return value

    def _put_back(self, source: str, value: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
        """Return the value with what was recorded in its place, where something was.

        Rows of another width (an engine that chooses fewer experts) cannot be put back: what follows from them can.
        """
        dim = self._token_dim(source)
        rows = as_rows(value, dim, *self._shape)
        if recorded[0].numel() != rows[0].numel():
            return value
        there = self._numbers >= 0
        given = recorded[self._numbers.clamp(min=0)].reshape(rows.shape)
        known = given.isfinite() if given.is_floating_point() else given >= 0
        known = known.flatten(1).all(dim=1) & there
        mixed = torch.where(known.view(-1, *[1] * (rows.dim() - 1)).to(rows.device), given.to(rows), rows)
        return from_rows(mixed, value, dim)

    def _keep(self, source: str, value: torch.Tensor) -> None:
        if self.kept is None or (CHOICE not in source and source not in self._hf.graph.by_source):
            return
        rows = as_rows(value, self._token_dim(source), *self._shape)
        there = self._numbers >= 0
        self._places.put(self.kept, source, self._numbers[there], rows[there.to(rows.device)])

    def _token_dim(self, source: str) -> int:
        operation = self._hf.graph.by_source.get(source)
        return operation.token_dim if operation is not None else 0


def router_choices(graph: Graph) -> list[str]:
    """Return the sources of what routers choose, in the order of the run: of each its last choice, after its groups."""
    last: dict[str, str] = {}
    for operation in graph:
        if CHOICE in operation.source:
            last[operation.source.partition(CHOICE)[0]] = operation.source
    return list(last.values())


def rounded(x: torch.Tensor, dtype: torch.dtype, *, truncates: bool = False) -> torch.Tensor:
    """Round to a dtype of the cache, without a scale, to nearest or towards zero; what is too large is saturated."""
    most = min(torch.finfo(item).max for item in (dtype, x.dtype))  # bfloat16 is wider than float16
    found = x.clamp(-most, most).to(dtype)
    if truncates:  # sign and magnitude in one byte: one less is the next value towards zero
        is_larger = found.to(x.dtype).abs() > x.abs()
        found = (found.view(torch.uint8) - is_larger.to(torch.uint8)).view(dtype)
    return found.to(x.dtype)
