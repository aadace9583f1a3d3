"""Attention that a family of HF computes by itself, without HF's interface: found by its products of matrices.

`B` requests, `N` query heads, `K` KV heads, `T` tokens, `H` head size.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from harness.formats.taps import Kind
from harness.judge.compare.evidence import histories
from harness.judge.explain.core.rerun import Rerun, is_same
from harness.judge.explain.core.wrong_operation import KEY, VALUE, Downstream, WrongOperation
from harness.oracle.watch import AttentionCall

_MATMUL = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm}
_BADDBMM = {torch.baddbmm, torch.Tensor.baddbmm}
_SOFTMAX = {nn.functional.softmax, torch.softmax, torch.Tensor.softmax}


class _Products(TorchFunctionMode):
    """Keeps what the first attention of a run multiplies, and its scores as the softmax takes them."""

    def __init__(self, num_tokens: int, factor: float = 1.0) -> None:
        super().__init__()
        self.query: torch.Tensor | None = None
        """[..., T, H]."""
        self.key: torch.Tensor | None = None
        self.scores: torch.Tensor | None = None
        """[..., T, T], with bias and mask."""
        self.value: torch.Tensor | None = None
        self._num_tokens, self._factor = num_tokens, factor

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and self._num_tokens == args[0].shape[-2]:
            self._see(*args, **kwargs)
        if func in _SOFTMAX and self.scores is None and self._is_square(args[0]):
            self.scores = args[0].clone()
        if func in _MATMUL:
            return func(*self._multiplied(*args[:2]), *args[2:], **kwargs)
        if func in _BADDBMM:
            named = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
            named["batch1"], named["batch2"] = self._multiplied(named["batch1"], named["batch2"])
            return func(named.pop("input"), **named)
        return func(*args, **kwargs)

    def _see(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *_dropout_and_causal: Any,
        scale: float | None = None,
        **_: Any,
    ) -> None:
        repeated = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = self._factor * (query.shape[-1] ** -0.5 if scale is None else scale) * query @ repeated.mT
        least = torch.finfo(scores.dtype).min
        if attn_mask is None:
            attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
        is_bool = attn_mask.dtype == torch.bool
        self.scores = scores.masked_fill(~attn_mask, least) if is_bool else scores + attn_mask
        self.query, self.key, self.value = query.clone(), key.clone(), value.clone()

    def _is_square(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.shape[-2:] == (self._num_tokens, self._num_tokens)

    def _multiplied(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is multiplied: queries with the factor."""
        if self.scores is not None and self.value is None and self._is_square(first):
            self.value = second.clone()
        elif self.query is None and first.dim() > 2 and first.shape[-2] == second.shape[-1] == self._num_tokens:
            self.query, self.key = first.clone(), second.mT.clone()
            return self._factor * first, second
        return first, second


def _call_of(rerun: Rerun) -> AttentionCall | None:
    """Return the attention that HF's code around an operation computes, as a call of HF's interface; None for none.

    Its scores are linear in the queries: those without any are bias and mask, and the rest is the scale.
    """
    batch, path = rerun.part_inputs.batch, rerun.operation.module
    size, num_tokens = len(batch.sequences), batch.num_tokens
    with _Products(num_tokens, 0.0) as of_none:
        rerun.run()
    if of_none.value is None or of_none.query is None:  # None of a product that is written as an einsum
        return None
    with _Products(num_tokens) as right:
        rerun.run()
    tensors = of_none.scores, right.query, right.key, right.scores, right.value
    bias, query, key, scores, value = (x.reshape(size, -1, *x.shape[-2:]) for x in tensors if x is not None)
    products = query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT
    change = (scores - bias).masked_fill(bias < torch.finfo(bias.dtype).min / 2, 0.0)
    scale = float((change * products).sum() / (products * (change != 0)).square().sum())
    return AttentionCall(
        path=path,
        module=rerun.hf.module(path),
        query=query,
        key=key,
        value=value,
        mask=bias,
        options={"scaling": scale},
    )


def unshown_attention(wrong: WrongOperation) -> tuple[WrongOperation, torch.Tensor] | None:
    """Return the attention that a tap shows and HF's interface does not, and which wrong rows it has; None for none."""
    rerun = wrong.rerun
    if rerun is None or wrong.views or wrong.graph.attention_of(wrong.operation.layer) is not None:
        return None
    if not any(wrong.graph[tap].kind is Kind.OTHER for tap in (wrong.operation.tap, *wrong.unrecorded)):
        return None  # a product, a norm, ...: the context of attention is none of these
    call = _call_of(rerun)
    if call is None:
        return None
    places = rerun.places(wrong.rows)
    here = places[places >= 0]
    views, kept = histories(rerun.part_inputs.batch, call, here)
    listed = places.tolist()
    order = torch.tensor([listed.index(place) for place in kept.tolist()])
    context = torch.cat([view.attend() for view in views])
    behind = wrong.take(order)
    expected = {wrong.operation.tap: behind.expected} | {
        tap: rerun.values[tap][kept].flatten(1).to("cpu", torch.float64)
        for tap in wrong.unrecorded
        if tap in rerun.values
    }
    tap = next((tap for tap, rows in expected.items() if is_same(rows, context)), None)
    if tap is None:
        return None

    def push(context: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return rerun.run({tap: (kept[rows], context)})[kept[rows]]

    batch, is_seen = rerun.part_inputs.batch, tap == wrong.operation.tap
    lengths = torch.tensor([len(sequence) for sequence in batch.sequences])
    is_row = (torch.arange(batch.num_tokens) < lengths[:, None]).flatten()
    rows = rerun.rows.select(is_row)
    kept_rows = {
        name: (rows, x.transpose(1, 2).flatten(0, 1).flatten(1)[is_row.to(x.device)].cpu())
        for name, x in ((KEY, call.key), (VALUE, call.value))
    }
    inner = replace(
        behind,
        operation=replace(wrong.graph[tap], kind=Kind.ATTENTION, inputs=()),
        expected=expected[tap],
        actual=behind.actual if is_seen else expected[tap],
        inputs=[],
        views=views,
        kept_rows=kept_rows,
        downstream=None if is_seen else Downstream(tap=tap, actual=behind.actual, push=push),
    )
    return inner, order
