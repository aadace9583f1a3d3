"""Faults of attention: visible keys, scale and sum of scores, KV heads."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import reference_engine.attention.paged
from harness.extensions.faults.fault import FIRST, FIRST_DECODE, PROMPT_LENGTHS, SECOND, Category, FaultConfig, table_of
from harness.extensions.faults.reference.injection import replacing
from harness.extensions.faults.reference.position import CHUNK
from reference_engine.attention.paged import PagedAttention

_ATTENTION = "model.layers.0.attention"
_WINDOW = 16
_SPLIT = 16
_HEAD_DIM = 32
"""Of the embedded checkpoints."""
Mask = Callable[[int, int, int | None], torch.Tensor]
"""Rows, keys and window to [rows, keys] bool."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float | None = None,
    softmax: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores.softmax(dim=-1),
    heads: Callable[[int, int], torch.Tensor] | None = None,
    value_heads: Callable[[int, int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention by its definition: q [T, N, H], k and v [C, K, H], mask [T, C]; returns [T, N, H]."""
    num_heads, num_kv = q.shape[1], k.shape[1]
    kv_heads = torch.arange(num_heads) // (num_heads // num_kv) if heads is None else heads(num_heads, num_kv)
    of_values = kv_heads if value_heads is None else value_heads(num_heads, num_kv)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("tnh,cnh->ntc", q.float(), k[:, kv_heads].float()) * factor
    probs = softmax(scores.masked_fill(~mask, -torch.inf))
    return torch.einsum("ntc,cnh->tnh", probs.float(), v[:, of_values].float()).to(q.dtype)


def causal(num_rows: int, num_keys: int, window: int | None) -> torch.Tensor:
    """Return the mask [rows, keys] of the last rows of so many keys."""
    distance = torch.arange(num_keys - num_rows, num_keys)[:, None] - torch.arange(num_keys)
    return (distance >= 0) & (distance < (window or num_keys))


def everywhere(**changed: Any) -> Any:
    """Replace both kernels of the paged backend, for chunks and for single rows."""
    mask: Mask = changed.pop("mask", causal)

    def chunk(
        original: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        return attend(q, k, v, mask(len(q), len(k), window), **changed)

    def single(
        original: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        keys = torch.ones(len(q), k.shape[1], dtype=torch.bool) if visible is None else visible[:, 0, 0]
        rows = []
        for row, keep in enumerate(keys):
            row_mask = mask(1, int(keep.sum()), None)
            rows.append(attend(q[row : row + 1], k[row, keep], v[row, keep], row_mask, **changed))
        return torch.cat(rows)

    return replacing(
        (reference_engine.attention.paged, "attend_chunk", chunk),
        (reference_engine.attention.paged, "attend_single", single),
    )


def _chunks(mask: Mask) -> Any:
    """Replace the kernel for chunks by one with another mask."""

    def chunk(
        original: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        return attend(q, k, v, mask(len(q), len(k), window))

    return replacing((reference_engine.attention.paged, "attend_chunk", chunk))


def _sees_the_next(num_rows: int, num_keys: int, window: int | None) -> torch.Tensor:
    return torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows + 1)


def _not_itself(num_rows: int, num_keys: int, window: int | None) -> torch.Tensor:
    visible = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows - 1)
    visible[visible.sum(dim=1) == 0, 0] = True  # or the first row of all would see nothing
    return visible


def _top_left(num_rows: int, num_keys: int, window: int | None) -> torch.Tensor:
    return torch.ones(num_rows, num_keys, dtype=torch.bool).tril()


def _padding_attended(single: Callable[..., torch.Tensor], q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return single(q, k, v, None)


def _with_window(change: Callable[[int | None], int | None]) -> Any:
    def make(init: Callable[..., None], self: Any, spec: Any) -> None:
        init(self, replace(spec, layer_windows=tuple(change(window) for window in spec.layer_windows)))

    return replacing((PagedAttention, "__init__", make))


def tiled(num_heads: int, num_kv: int) -> torch.Tensor:
    """Return the KV head of each query head, counted modulo."""
    return torch.arange(num_heads) % num_kv


def _scaled(scores: torch.Tensor) -> torch.Tensor:
    scaled: torch.Tensor = scores.softmax(dim=-1) * _HEAD_DIM**-0.5
    return scaled


def _lowered(bias: float, *, is_masked_after: bool = False) -> Any:
    """Add a bias to masked scores; and set their probabilities to zero, or not."""

    def chunk(
        original: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        mask = causal(len(q), len(k), window)

        def softmax(scores: torch.Tensor) -> torch.Tensor:
            probabilities = (scores + bias * ~mask).softmax(dim=-1)
            return probabilities * mask if is_masked_after else probabilities

        return attend(q, k, v, torch.ones_like(mask), softmax=softmax)

    return replacing((reference_engine.attention.paged, "attend_chunk", chunk))


def _in_bfloat16(scores: torch.Tensor) -> torch.Tensor:
    return scores.to(torch.bfloat16).softmax(dim=-1).to(scores.dtype)


def split_decode(merge: Callable[[list[torch.Tensor], list[torch.Tensor]], torch.Tensor]) -> Any:
    """Decode in pieces of `_SPLIT` keys; `merge` gets each piece's output [N, H] and log-sum-exp [N, 1]."""

    def single(
        original: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        keys = torch.ones(len(q), k.shape[1], dtype=torch.bool) if visible is None else visible[:, 0, 0]
        group = q.shape[1] // k.shape[2]
        rows = []
        for row, keep in enumerate(keys):
            own_k, own_v = (x[row, keep].repeat_interleave(group, dim=1) for x in (k, v))
            scores = torch.einsum("nh,cnh->nc", q[row].float(), own_k.float()) * q.shape[-1] ** -0.5
            outs, sums = [], []
            for part, values in zip(scores.split(_SPLIT, dim=1), own_v.split(_SPLIT), strict=True):
                outs.append(torch.einsum("nc,cnh->nh", part.softmax(dim=-1), values.float()))
                sums.append(part.logsumexp(dim=-1, keepdim=True))
            rows.append(merge(outs, sums).to(q.dtype))
        return torch.stack(rows)

    return replacing((reference_engine.attention.paged, "attend_single", single))


def merge_exactly(outs: list[torch.Tensor], sums: list[torch.Tensor]) -> torch.Tensor:
    """Weigh the pieces by what each would have had of the whole."""
    return (torch.stack(outs) * torch.stack(sums).softmax(dim=0)).sum(dim=0)


def _merge_in_base_two(outs: list[torch.Tensor], sums: list[torch.Tensor]) -> torch.Tensor:
    weights = (torch.stack(sums) * torch.log(torch.tensor(2.0))).softmax(dim=0)
    return (torch.stack(outs) * weights).sum(dim=0)


_fault = table_of(category=Category.ATTENTION, tap=_ATTENTION, row=SECOND)
_CHUNKED = FaultConfig(schedule=f"chunked:{CHUNK}")
WINDOWED = FaultConfig(
    model="llama-tiny",
    config={
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": _WINDOW,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
)
FAULTS = [
    _fault("mask-sees-the-next", "The causal mask is one off: a row sees the token after it.", _chunks(_sees_the_next),
           "sees the next token", row=FIRST),
    _fault("mask-not-itself", "The causal mask is one off: a row does not see itself.", _chunks(_not_itself), "itself"),
    _fault("mask-missing", "A prefill has no causal mask.",
           _chunks(lambda num_rows, num_keys, window: torch.ones(num_rows, num_keys, dtype=torch.bool)),
           "no causal mask", row=FIRST),
    _fault("mask-top-left", "The mask of a chunk is aligned with the first key instead of the last.",
           _chunks(_top_left), "top-left", row=(0, CHUNK), setting=_CHUNKED),
    _fault("padding-attended", "In a ragged decode batch, shorter requests see the padding.",
           replacing((reference_engine.attention.paged, "attend_single", _padding_attended)), "padding is attended to",
           row=(1, PROMPT_LENGTHS[1])),
    _fault("window-one-more", "The sliding window holds one token too many.",
           _with_window(lambda window: window and window + 1), "too wide", row=(0, _WINDOW), setting=WINDOWED,
           instance="transformers#39408"),
    _fault("window-one-less", "The sliding window holds one token too few.",
           _with_window(lambda window: window and window - 1), "too narrow", row=(0, _WINDOW - 1), setting=WINDOWED),
    _fault("window-ignored", "There is no sliding window.", _with_window(lambda window: None), "window is ignored",
           row=(0, _WINDOW), setting=WINDOWED),
    _fault("kv-heads-tiled", "Query head i reads KV head i modulo their number instead of i divided by the group.",
           everywhere(heads=tiled), "tiled", row=FIRST, instance="jax-js#180"),
    _fault("scale-of-hidden-size", "Scores are divided by the root of the hidden size.", everywhere(scale=96**-0.5),
           "softmax scale.*hidden size", instance="mlc-llm#3426"),
    _fault("scale-after-softmax", "The probabilities are scaled, and not the scores.",
           everywhere(scale=1.0, softmax=_scaled), "scale is applied after", row=FIRST),
    _fault("softmax-over-heads", "The softmax runs over the heads.",
           everywhere(softmax=lambda scores: scores.softmax(dim=0).nan_to_num(0.0)), "over the heads", row=FIRST),
    _fault("mask-of-minus-10", "The mask lowers scores by 10.", _lowered(-10.0), "lowered by 10 ", row=FIRST),
    _fault("mask-after-softmax", "Masked probabilities are set to zero, and the others not normalised again.",
           _lowered(0.0, is_masked_after=True), "mask is applied after", row=FIRST),
    _fault("scale-missing", "Scores are not scaled.", everywhere(scale=1.0), "softmax scale is missing"),
    _fault("split-merge-base-two", "The pieces of a split decode are merged with logarithms of base two.",
           split_decode(_merge_in_base_two), "merged in base 2", row=FIRST_DECODE, instance="sglang#40903"),
    _fault("split-merge-without-rescale", "The pieces of a split decode are averaged.",
           split_decode(lambda outs, sums: torch.stack(outs).mean(dim=0)), "averaged", row=FIRST_DECODE),
    _fault("softmax-bf16", "The softmax is computed in bfloat16.", everywhere(softmax=_in_bfloat16),
           "softmax is in bfloat16"),
]  # fmt: skip
